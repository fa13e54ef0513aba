"""Files for models: uploaded by users, in runs' inputs, and made by tools."""
