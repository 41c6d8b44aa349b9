"""Deprecated: the former name of `covey.federated.privacy.device_identity`."""

import warnings

from covey.federated.privacy.device_identity import DeviceIdentity as Identity
from covey.federated.privacy.device_identity import DeviceTrust as Trust

__all__ = ["Identity", "Trust"]

warnings.warn(
    "covey.federated.privacy.identity is deprecated: import covey.federated.privacy.device_identity",
    DeprecationWarning,
    stacklevel=2,
)
