"""The operator for MSJobs, and all other code that calls a Kubernetes API server. `covey.core.jobs` makes the decisions.

The operator connects to the API server and to the REST port of each job's scheduler, never to a training process. It needs no
torch.

    `operator`           the operator process
    `controller`         computes the plan of a job from the caches, and applies it
    `work_queue`         keys of jobs to reconcile
    `reflector`          cache of one kind of object, updated by list and watch
    `api_client`         Kubernetes API; the only module that uses lightkube
    `http_client`        HTTP/1.1 client of `api_client` and `scheduler_client`
    `leader_election`    lease that decides which replica of the operator acts
    `event_recorder`     Kubernetes events
    `pod_builder`        pods, services and secret of a job
    `scheduler_client`   REST requests to the scheduler of each job
    `cas_store`          compare-and-swap values in Leases and ConfigMaps, for the schedulers of jobs
    `crd`                custom resource definitions
    `manifests`          objects of an installation
    `install`            applies the manifests
    `operator_metrics`   Prometheus metrics of the operator
"""
