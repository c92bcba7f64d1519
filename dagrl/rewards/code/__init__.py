"""The `code` reward: tests the program in a response in the sandbox."""
