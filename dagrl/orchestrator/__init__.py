"""The process of the driver: the main loop, its worker groups and the run folder. `docs/schedule.md` follows a step."""
