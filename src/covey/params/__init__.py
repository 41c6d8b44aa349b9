"""Deprecated: the former name of `covey.parameter_server`: `optimizers`, `files`."""
