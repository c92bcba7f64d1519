"""The page of a report: its scripts, styles and libraries, put together into one file by `assemble`."""
