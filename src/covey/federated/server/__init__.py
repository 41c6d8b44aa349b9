"""Server process of a federated cluster.

`server`              constructs the parts below; connection to the scheduler, tasks that make and fetch models
`server_state`        state that the parts share: settings, position in the cluster, notification of changes
`admission_requests`  devices that the scheduler has admitted to the round
`device_port`         paths for devices: startFLJob, getModel and others
`update_handler`      updateModel: check, claim, log, add, acknowledge
`secagg_endpoints`    paths of secure rounds
`request_auth`        signatures, nonces, rate limit
`device_replies`      replies without a model: code and reason
`http_server`         HTTP/1.1 server for large bodies
`openapi`             the OpenAPI document of the device port
`browser_page`        the page that turns a browser tab into a device
`round_storage`       a server's directory: the logs of its rounds, and logs adopted from other servers
`update_log`          log of updates; `update_replication` syncs or replicates it
`partial_aggregate`   this server's part of a round's sum: an `accumulator` (fixed point) or a `masked_accumulator`
`aggregation`         from all servers' parts to the next model
`model_cache`         models in memory; `model_store` has them on disk
`server_links`        connections to the other servers; `scheduler_link` is the one to the scheduler
"""
