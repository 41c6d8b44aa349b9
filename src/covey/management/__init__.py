"""The management port: REST API, metrics, health, web console. It reads a view of the cluster and submits requests.

`http_server`       HTTP with limits
`common_api`        paths that every cluster answers; `auth` decides which requests may pass
`training_api`      paths of a training cluster: recoveries, scaling, kill
`standby_api`       a standby scheduler: redirects to the leader
`jobs_api`          the operator's console
`schemas`           JSON bodies of requests and replies; `openapi` makes the document from them
`cluster_metrics`   Prometheus text
`live_stream`       snapshots and changes for open pages
`web_files`         static files and security headers
"""
