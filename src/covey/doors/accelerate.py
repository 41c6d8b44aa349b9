"""Deprecated: the former name of `covey.integrations.accelerate`."""

import warnings

from covey.integrations.accelerate import Accelerator

__all__ = ["Accelerator"]

warnings.warn("covey.doors.accelerate is deprecated: import covey.integrations.accelerate", DeprecationWarning, stacklevel=2)
