"""The commands of `covey`. No other package imports this one.

`main`               click commands
`run`                `covey run`
`status`             status, nodes, logs, env; selection of the cluster
`top_and_events`     top, events, story
`check`              check the connection to a scheduler
`kill`               kill one process
`bundle`             support bundle for a bug report
`chaos`              inject faults
`tls`                certificates
`federated`          federated clusters; `federated_simulate` simulates devices
`job_commands`       submit, jobs, operator; `kubernetes` implements them
`scheduler_client`   one connection to a scheduler
`common`             options and output that commands share
`spinner`            spinner of slow commands; colours
`completion`         shell completion
"""
