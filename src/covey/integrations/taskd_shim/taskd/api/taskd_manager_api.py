"""The manager's calls."""

from covey.integrations.taskd import init_taskd_manager, start_taskd_manager

__all__ = ["init_taskd_manager", "start_taskd_manager"]
