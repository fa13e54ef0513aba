"""End users of tenants: their exports and erasures."""
