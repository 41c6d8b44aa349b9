"""Deprecated former name of `covey.parameter_server.optimizers`. Its import emits a DeprecationWarning."""

import warnings

from covey.parameter_server.optimizers import FTRL, SGD, Adagrad, Adam, LazyAdam, Momentum

__all__ = ["FTRL", "SGD", "Adagrad", "Adam", "LazyAdam", "Momentum"]

warnings.warn(
    "covey.params.optimizers is deprecated: import covey.parameter_server.optimizers", DeprecationWarning, stacklevel=2
)
