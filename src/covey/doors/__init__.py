"""Deprecated former name of `covey.integrations`. Its modules: `lightning`, `accelerate`."""
