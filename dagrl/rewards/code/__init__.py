"""The `code` reward: the program in a response, judged by tests that run in the sandbox."""
