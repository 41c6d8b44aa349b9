"""TaskD's calls for a manager, implemented by `covey.integrations.taskd`."""

from covey.integrations.taskd import init_taskd_manager, start_taskd_manager

__all__ = ["init_taskd_manager", "start_taskd_manager"]
