"""A model behind an OpenAI endpoint that samples for evaluations."""
