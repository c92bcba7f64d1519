"""The plan of a run, and the state machine that schedules it (`scheduler`)."""
