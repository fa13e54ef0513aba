"""Routes that store many definitions at once."""
