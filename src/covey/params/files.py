"""Deprecated former name of `covey.parameter_server.checkpoint_files`, with its `export` only. Its import emits a
DeprecationWarning."""

import warnings

from covey.parameter_server.checkpoint_files import export

__all__ = ["export"]

warnings.warn(
    "covey.params.files is deprecated: import covey.parameter_server.checkpoint_files", DeprecationWarning, stacklevel=2
)
