"""Agent rollouts: a program of the user's speaks to the policy through an OpenAI endpoint.

``play.py`` is the entry point: it passes the requests of a call's trajectories to the engine. ``running.py`` runs the
program of one, which may outlive the call.
``gateway.py`` is the endpoint, with one module for each of its three protocols; ``session.py`` is what it knows of a
trajectory, ``tree.py`` the tokens of it, and ``programs.py`` runs functions, commands and services.
"""
