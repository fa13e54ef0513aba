"""Tools that come with the service, and the one way out for HTTP (spec pages 1 and 5)."""
