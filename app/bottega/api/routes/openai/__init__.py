"""OpenAI's API: its models are Bottega's agents, and each completion is a run."""
