"""Multi-turn rollouts: tools or an environment answer the policy's turns.

``loop.py`` is the entry point, ``requests.py`` queues requests to the engine, ``dialogue.py`` decides what follows a
turn, ``settings.py`` loads tools and parsers, ``jobs.py`` runs tools and environments, and ``template.py`` writes
answers as tokens.
"""
