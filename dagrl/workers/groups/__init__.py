"""All workers of a run, as the driver sees them: where they live, how they are called, what becomes of the lost."""
