"""The output of `dagrl plan`: `report` computes it, `show` and `show_steps` format it."""
