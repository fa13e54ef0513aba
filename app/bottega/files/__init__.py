"""Files for models. The source of a file is an upload, a run's input or a tool."""
