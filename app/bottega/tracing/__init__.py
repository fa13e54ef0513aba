"""Spans of runs for OpenTelemetry: their names and attributes, and their export."""
