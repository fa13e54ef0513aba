"""Secrets of tenants: encrypted rows, rules about hosts, and look-up of values for runs."""
