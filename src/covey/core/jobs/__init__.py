"""An MSJob, decided: what the object says, and what to do about it now. `plan_job` puts the other modules together:

    plan_job(job, observed, now) -> actions, status, requeue_after, reason

All of it works on plain dicts as the API server sends them. Not here: the API server, and the contents of a pod
(`covey.kubernetes.pod_builder`).

    `plan`                one reconcile pass
    `reconcile_context`   the observed objects of a pass, pods by name, cleanup at the end of a job
    `spec`                parses and validates an MSJob
    `pod_template`        checks the shape of a pod template
    `ascend_job`          converts an AscendJob into an MSJob
    `pod_state`           what the state of a pod means
    `failure_policy`      what follows a failed pod
    `resize`              whether the job may grow or must shrink
    `scheduler_status`    what the job's own scheduler reports
    `status`              conditions and counters of the job's status
    `actions`             what a plan can ask for: create, delete, adopt
    `output_paths`        warnings for output that is lost with its container
    `timestamps`          Kubernetes times
"""

from covey.core.jobs.plan import ReconcilePlan, plan_job
from covey.core.jobs.reconcile_context import Observed
from covey.core.jobs.spec import InvalidJob, Job, parse_job

__all__ = ["InvalidJob", "Job", "Observed", "ReconcilePlan", "parse_job", "plan_job"]
