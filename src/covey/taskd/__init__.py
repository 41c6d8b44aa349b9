"""TaskD's calls, under their own names, carried out by covey: docs/taskd.md.

    from covey.taskd import init_taskd_manager, start_taskd_manager

    init_taskd_manager({"job_id": "mnist", "node_nums": 2, "proc_per_node": 4})
    start_taskd_manager()      # returns when the job has ended

The manager is a covey scheduler on port 9601, or watches the one that runs already: there is never a second one to decide.
None of these calls raises: what is wrong is one sentence in the log, and False. `scheduling` is the manager, `parts` are agent,
worker and proxy, `config` is what they have in common, and `launcher` is what `import taskd.python.adaptor.patch` does to
torchrun.
"""

from covey.taskd.parts import (
    destroy_taskd_proxy,
    destroy_taskd_worker,
    init_taskd_agent,
    init_taskd_proxy,
    init_taskd_worker,
    register_func,
    start_taskd_agent,
    start_taskd_worker,
)
from covey.taskd.scheduling import init_taskd_manager, start_taskd_manager

__all__ = [
    "destroy_taskd_proxy",
    "destroy_taskd_worker",
    "init_taskd_agent",
    "init_taskd_manager",
    "init_taskd_proxy",
    "init_taskd_worker",
    "register_func",
    "start_taskd_agent",
    "start_taskd_manager",
    "start_taskd_worker",
]
