"""Files for models. A file comes from an upload, from a run's input or from a tool."""
