"""The management port: REST API, metrics, health check and web console.

`http_server`       HTTP with limits
`common_api`        operations of every cluster; `auth` authorizes requests
`training_api`      operations of a training cluster: recoveries, resizes, kill
`leader_redirect`   a standby scheduler: redirects to the leader
`jobs_api`          the operator's console
`schemas`           JSON bodies of requests and replies; `openapi` makes the document from them
`cluster_metrics`   Prometheus text
`live_stream`       snapshots and deltas for open pages
`web_files`         static files and security headers
"""
