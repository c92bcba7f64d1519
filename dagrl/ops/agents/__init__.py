"""Agent rollouts: a program of the user's speaks to the policy through an OpenAI endpoint.

``play.py`` is the entry point: it starts a program for each trajectory and passes its requests to the engine.
``gateway.py`` is the endpoint, with one module for each of its three protocols; ``session.py`` is what it knows of a
trajectory, ``tree.py`` the tokens of it, and ``programs.py`` runs functions, commands and services.
"""
