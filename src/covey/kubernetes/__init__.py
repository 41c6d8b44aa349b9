"""Operator for MSJobs and AscendJobs, and client of the Kubernetes API.

`covey.core.msjob` makes the decisions. The operator connects to the API server and to the REST port of each running job's
scheduler, never to a training process.

    `operator`           the operator process
    `controller`         computes the plan of a job from the caches and carries it out
    `work_queue`         keys of jobs to reconcile
    `reflector`          cache of one kind of object, updated by list and watch
    `api_client`         Kubernetes API; the only module that uses lightkube
    `http1_client`       HTTP/1.1 client of `api_client` and `scheduler_rest_client`
    `operator_lease`     lease that decides which replica of the operator acts
    `event_recorder`     Kubernetes events
    `pod_builder`        pods, services, secret and PodGroup of a job
    `scheduler_rest_client` REST requests to the scheduler of each job
    `cas_store`          compare-and-swap values in Leases and ConfigMaps, for the schedulers of jobs
    `crd`                custom resource definitions
    `manifests`          objects of an installation
    `server_side_apply`  creates or updates given objects
    `operator_metrics`   Prometheus metrics of the operator
"""
