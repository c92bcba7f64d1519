"""Multi-turn rollouts: tools or an environment answer the policy's turns.

``loop.py`` is the entry point, ``requests.py`` queues requests to the engine, ``dialogue.py`` decides what follows a
turn, ``calls.py`` parses tool calls, ``jobs.py`` runs tools and environments, and ``template.py`` writes answers as
tokens.
"""
