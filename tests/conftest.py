"""For all tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("patient", deadline=None)  # machines are shared: how long an example takes says nothing
settings.load_profile("patient")
