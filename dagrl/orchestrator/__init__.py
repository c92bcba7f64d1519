"""The run itself: the main loop, its steps, and the run folder. `docs/schedule.md` follows a step through it."""
