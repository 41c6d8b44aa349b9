"""The commands of `covey`.

`main`               entry point, and most click commands
`run`                `covey run`
`status`             status, nodes, logs, env; selection of the cluster
`top_and_events`     top, events, story
`check`              check the connection to a scheduler
`kill`               kill one process
`bundle`             support bundle for a bug report
`chaos`              inject faults into a running cluster
`tls`                certificates
`federated`          federated clusters; `federated_simulate` simulates devices
`kubernetes_commands` submit, jobs, operator; `kubernetes` implements them, and `logs --job`
`scheduler_session`  one connection to a scheduler
`common`             options, output and a file check that commands share
`spinner`            spinner of slow commands; colours
`completion`         shell completion
"""
