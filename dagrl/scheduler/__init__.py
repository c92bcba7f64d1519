"""What may run when: the scheduler and all that it consists of. `scheduler` is the door, `commands` its words."""
