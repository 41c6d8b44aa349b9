"""The commands of `covey`. Nothing imports this package.

`main`                 click commands
`run`                  `covey run`
`status`               status, nodes, logs, env; finds the cluster
`follow`               top, events, story
`check`                check: can this host reach the scheduler
`kill`                 kill one process
`bundle`               support bundle for a bug report
`chaos`                inject faults
`tls`                  certificates
`federated`            federated clusters; `federated_simulate` simulates devices
`job_commands`         submit, jobs, operator; `kubernetes` implements them
`scheduler_client`     one connection to a scheduler
`common`               options and output that commands share
`spinner`              shown while a command waits
`completion`           shell completion
"""
