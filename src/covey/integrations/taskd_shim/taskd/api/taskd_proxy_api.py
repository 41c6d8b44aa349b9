"""TaskD's calls for a proxy, implemented by `covey.integrations.taskd`."""

from covey.integrations.taskd import destroy_taskd_proxy, init_taskd_proxy

__all__ = ["destroy_taskd_proxy", "init_taskd_proxy"]
