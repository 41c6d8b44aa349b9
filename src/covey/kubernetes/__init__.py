"""The operator for MSJob, and everything else that talks to a Kubernetes API server. Decisions are in `covey.core.jobs`.

It knows pods, not sockets: it never connects to a training process and needs no torch.

    `operator`           the operator process
    `controller`         reads the caches, asks for a plan, applies it
    `work_queue`         names of jobs to reconcile
    `reflector`          cache kept by list and watch
    `api_client`         the only module that uses the client library; `http_client` sends its requests
    `leader_election`    which operator acts
    `event_recorder`     Kubernetes events
    `pod_builder`        the pods of a job
    `scheduler_client`   REST requests to the scheduler of each job
    `cas_store`          compare-and-swap values in Leases and ConfigMaps, for the schedulers of jobs
    `crd`                the custom resource definition
    `manifests`          what is installed; `install` applies it
    `operator_metrics`   Prometheus metrics of the operator
"""
