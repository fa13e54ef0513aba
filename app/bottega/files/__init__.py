"""Files for models: files that users upload, that runs' inputs contain, and that tools make."""
