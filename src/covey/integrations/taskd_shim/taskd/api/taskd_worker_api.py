"""TaskD's calls for a worker, implemented by `covey.integrations.taskd`."""

from covey.integrations.taskd import destroy_taskd_worker, init_taskd_worker, start_taskd_worker

__all__ = ["destroy_taskd_worker", "init_taskd_worker", "start_taskd_worker"]
