"""JSON Schemas of users: bounded in cost, checked, and applied to arguments and answers. Pure."""
