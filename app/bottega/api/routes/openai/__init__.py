"""OpenAI's API: its models are Bottega's agents, and a completion is a run."""
