"""Deprecated: the former name of `covey.integrations`: `lightning`, `accelerate`."""
