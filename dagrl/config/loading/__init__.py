"""From the files of a pipeline to its schema, with the line of everything."""
