"""MSJob on Kubernetes: the shell around `core.job.plan`.

Here lives what talks to the API server: `api` (the one module that knows the client library) over `http`, `reflector` (a cache
kept by list and watch), `queue` (whose turn it is), `controller` (reads the caches, asks for a plan, carries it out), `events`
(what is told of it), `lease` (who may act), `pods` (what a pod of a job looks like), `crd`, `manifests` and `install` (what is
installed), `metrics`, and `service`, which puts them together. `clusters` asks the schedulers inside the pods how their
trainings go, over REST. `cells` is for those schedulers, where they agree on who leads. It knows pods, not sockets: it never
speaks with a training process, and needs no torch.
"""
