"""TaskD's calls for an agent, implemented by `covey.integrations.taskd`."""

from covey.integrations.taskd import init_taskd_agent, register_func, start_taskd_agent

__all__ = ["init_taskd_agent", "register_func", "start_taskd_agent"]
