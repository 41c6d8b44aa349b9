"""Deprecated former name of `covey.integrations.accelerate`. Its import emits a DeprecationWarning."""

import warnings

from covey.integrations.accelerate import Accelerator

__all__ = ["Accelerator"]

warnings.warn("covey.doors.accelerate is deprecated: import covey.integrations.accelerate", DeprecationWarning, stacklevel=2)
