"""What `dagrl plan` tells: `report` finds it out, `show` and `show_steps` say it."""
