"""`dagrl launch`: the same command on every machine of a job. One leads, the others join; all end together.

``place.py`` reads where this machine stands among the others. They meet at the leader's port (``roll_call.py``,
``follower.py``) and stay connected (``wire.py``), so that each knows when another is gone. Ray's processes of a machine
are ``ray_node.py``'s. On the leader `dagrl run` runs as on a single machine (``leader.py``).
"""
