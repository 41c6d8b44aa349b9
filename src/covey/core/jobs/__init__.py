"""An MSJob, decided: what the object says, and what to do about it now. `plan_job` puts the other modules together:

    plan_job(job, observed, now) -> actions, status, requeue_after, reason

All of it works on plain dicts as the API server sends them. Not here: the API server, and the contents of a pod
(`covey.kubernetes.pod_builder`).

    `plan`                one reconcile pass: `plan_job`, and the order of its steps
    `reconcile_context`   what a pass reads: the job, the observed objects, the time
    `status`              what a pass writes to the job's status
    `scaling`             the states of a resize, in the status
    `plan_builder`        the actions of a pass, and when the next one is needed
    `pod_failures`        steps about failed, lost and overdue pods and their replacements
    `resize`              step: whether the job may grow or must shrink
    `completion`          steps about the end of a job and the cleanup after it
    `spec`                parses and validates an MSJob
    `pod_template`        checks the shape of a pod template
    `ascend_job`          converts an AscendJob into an MSJob
    `pod_state`           what the state of a pod means
    `failure_policy`      what follows a failed pod
    `scheduler_status`    what the job's own scheduler reports
    `actions`             what a plan can ask for: create, delete, adopt
    `output_paths`        warnings for output that is lost with its container
    `timestamps`          Kubernetes times
"""

from covey.core.jobs.plan import plan_job
from covey.core.jobs.plan_builder import ReconcilePlan
from covey.core.jobs.reconcile_context import Observed
from covey.core.jobs.spec import InvalidJob, Job, parse_job

__all__ = ["InvalidJob", "Job", "Observed", "ReconcilePlan", "parse_job", "plan_job"]
