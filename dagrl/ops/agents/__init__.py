"""Agent rollouts: a user's program calls the policy through an OpenAI endpoint.

``play.py`` is the entry point: it passes the requests of a call's trajectories to the engine. ``running.py`` runs the
program of one trajectory, which may outlive the call. ``gateway.py`` is the endpoint, with one module for each of its
three protocols; ``session.py`` holds the state of a trajectory, ``tree.py`` its tokens, and ``programs.py`` runs
functions, commands and services.
"""
