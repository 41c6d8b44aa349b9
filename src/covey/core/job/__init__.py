"""A training job on Kubernetes, decided: what an MSJob says, and what to do about it now.

`spec` reads and judges the object, `template` the shape of its pods, `ascend` turns an AscendJob into one, `pod` knows what a
pod's state means, `failure` says what follows a failed pod, `live` what the job's own scheduler says, `resize` whether there
may be more workers, `status` keeps what must be remembered, `turn` is one look at a job, `actions` are what may be done, and
`plan` puts them together:

    plan(job, observed, now) -> actions, status, requeue_after, reason

Times are read by `clock`, and where output goes by `paths`. Everything here works on plain dicts as the API server sends them.
Not here: the API server, and what a pod looks like inside (`kubernetes/pod_builder.py`).
"""

from covey.core.job.plan import Plan, plan
from covey.core.job.spec import Invalid, Job, read
from covey.core.job.turn import Observed

__all__ = ["Invalid", "Job", "Observed", "Plan", "plan", "read"]
