"""`dagrl launch`: the same command on every machine of a job. Rank 0 leads, the others follow, and all exit together.

``node_rank.py`` reads the PET_* variables. Followers connect to rank 0 (``rendezvous.py``, ``follower.py``) and stay
connected, so that each machine notices when another one disappears. Rank 0 runs `dagrl run` (``leader.py``).

Each machine joins the cluster with `ray start --block`. `ray symmetric-run` (Ray 2.60) does not replace this package:

- ranks above 0 always exit with 0: they learn neither the exit code nor the reason;
- SIGTERM ends it without a word to the command, so that a batch system's time limit loses the checkpoint;
- it names no missing rank, waits for 30 s only, and accepts machines that disagree about ranks or their number;
- it distributes no token, and `ray start --head` always opens the port of Ray's client;
- it refuses a machine on which another Ray runs, and its `ray stop` ends every Ray of that user.
"""
