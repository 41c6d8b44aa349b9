"""The management port: REST, metrics, health, the web page. It sees a `ClusterView` and a few verbs, never a shell.

`server` serves HTTP, `api` has the paths that every cluster answers and `guard` says who may ask; `training`, `standby` and
`jobs` answer for a training, for a scheduler that stands by and for the operator. `replies` are the types, `openapi` the
document made of them, `metrics` what Prometheus reads, `page` the files of the web page and `live` its stream.
"""
