"""Secrets of tenants: encrypted rows, their hosts, and their values while runs go on."""
