"""Fields of libraries' configs that a pipeline file may not set, and why."""
