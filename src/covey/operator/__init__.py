"""MSJob on Kubernetes: the shell around `core.job.plan`.

Here lives what talks to the API server: `api` (the one module that knows the client library), `reflector` (a cache kept by list
and watch), `queue` (whose turn it is), `controller` (reads the caches, asks for a plan, carries it out), `lease` (who may
act), `pods` (what a pod of a job looks like), `crd` and `manifests` (what is installed), `metrics`, and `service`, which puts
them together. It knows pods, not sockets: it never speaks with a training process, and needs no torch.
"""
