"""Deprecated former name of `covey.integrations.lightning`, whose `CoveyStrategy` is `Strategy` here. Its import emits a
DeprecationWarning."""

import warnings

from covey.integrations.lightning import CoveyStrategy as Strategy

__all__ = ["Strategy"]

warnings.warn("covey.doors.lightning is deprecated: import covey.integrations.lightning", DeprecationWarning, stacklevel=2)
