"""Users' JSON Schemas: limits of cost, validation, and use for arguments and answers. Pure."""
