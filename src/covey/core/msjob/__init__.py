"""Parsing and planning of MSJobs: pure functions on plain dicts, as the API server sends them.

An MSJob is a Kubernetes custom resource that describes a training job. The operator reconciles each one in passes: it observes
the job, computes a plan, writes the status and carries out the actions.

    plan_job(job, observed, now) -> ReconcilePlan: actions, status, requeue_after, reason

`covey.kubernetes` calls the API server and builds the pods (`pod_builder`).

    `plan`                one reconcile pass: `plan_job`, and the order of its steps
    `reconcile_context`   input of a pass: the job, the observed objects, the time
    `status`              the job's status, written by a pass
    `scaling_status`      the states of a resize, in the status
    `plan_builder`        the actions of a pass, and when the next one is needed
    `pod_failures`        steps: failed, lost and overdue pods and their replacements
    `resize`              step: scale-out and scale-in of a running job
    `completion`          steps: the end of a job and the cleanup after it
    `spec`                parses and validates an MSJob
    `pod_template`        checks the shape of a pod template
    `ascend_job`          converts an AscendJob into an MSJob
    `pod_state`           interprets the state of a pod and of its node
    `failure_policy`      decides what follows a failed pod
    `scheduler_status`    state of the cluster inside the pods, as the job's scheduler reports it
    `actions`             the actions of a plan: create, delete, adopt, ...
    `output_paths`        warnings about output that is lost with its container
    `timestamps`          conversion of Kubernetes times
"""

from covey.core.msjob.plan import plan_job
from covey.core.msjob.plan_builder import ReconcilePlan
from covey.core.msjob.reconcile_context import Observed
from covey.core.msjob.spec import InvalidJob, Job, parse_job

__all__ = ["InvalidJob", "Job", "Observed", "ReconcilePlan", "parse_job", "plan_job"]
