"""Deprecated: the former name of `covey.federated.privacy.device_certificates`."""

import warnings

from covey.federated.privacy.device_certificates import DeviceIdentity as Identity
from covey.federated.privacy.device_certificates import DeviceTrust as Trust

__all__ = ["Identity", "Trust"]

warnings.warn(
    "covey.federated.privacy.identity is deprecated: import covey.federated.privacy.device_certificates",
    DeprecationWarning,
    stacklevel=2,
)
