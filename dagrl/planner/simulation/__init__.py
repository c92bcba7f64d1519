"""What a run will be like: the scheduler, driven by what its commands cost. `simulate` is the door."""
