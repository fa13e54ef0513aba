"""Files for models: from users, from run inputs and from tools."""
