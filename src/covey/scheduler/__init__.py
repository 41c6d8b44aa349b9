"""The scheduler process of a training cluster, around `covey.core.cluster.scheduler_machine`.

`main`              entry point of the process
`service`           builds a scheduler from the settings and runs it, as the only one, as leader or as standby
`scheduler`         sockets, journal and clock around the state machine
`connections`       direct and relayed connections by number
`leader_commits`    writes the decisions of the state machine to the journal
`lease_keeper`      acquires and renews the leader's lease
"""
