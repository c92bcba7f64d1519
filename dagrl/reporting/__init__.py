"""Reports for `dagrl report` and `dagrl plan --simulate`. Only the command line imports this: it needs the planner."""
