"""The plan of a run, and the state machine that decides what may run when (`scheduler`)."""
