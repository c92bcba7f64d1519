"""What the user declares: the pipeline file, its columns and its graph. Imports neither torch nor ray."""
