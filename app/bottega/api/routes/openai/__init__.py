"""OpenAI's API: a model is an agent, and a completion is a run."""
