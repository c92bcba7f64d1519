"""Rollouts of several turns: what a policy says is answered by tools or an environment, and it goes on behind that.

``loop.py`` is the way in: it asks the engine, ``answers.py`` says what a turn asks for, ``calls.py`` reads tool calls,
``jobs.py`` runs tools and environments, and ``template.py`` writes their answers as tokens.
"""
