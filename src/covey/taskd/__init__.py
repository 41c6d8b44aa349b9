"""Deprecated former name of `covey.integrations.taskd`. Its import emits a DeprecationWarning."""

import warnings

from covey.integrations.taskd import *  # noqa: F403
from covey.integrations.taskd import __all__ as __all__

warnings.warn("covey.taskd is deprecated: import covey.integrations.taskd", DeprecationWarning, stacklevel=2)
