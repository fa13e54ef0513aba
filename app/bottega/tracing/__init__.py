"""Spans of runs for OpenTelemetry: what they are named, and how they are sent."""
