"""Deprecated former name of `covey.parameter_server`. Its modules: `optimizers`, `files`."""
