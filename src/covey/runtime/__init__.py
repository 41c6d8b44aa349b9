"""Shared parts of the processes of a cluster: node runtimes, listeners, log access, Linux calls.

`node_runtime`        runs the state machine of a node or agent that has its own connection to the scheduler
`relayed_node_runtime` the same for a child of an agent, through the agent's relay
`child_environment`   variables, signal and parameters that a process of covey passes to its children
`credentials`         join secret and TLS contexts from the settings
`host_identity`       id, name and address of this host
`listeners`           binds cluster and REST ports; limit of open files
`management_port`     serves the REST API; its imports run on another thread
`view_stream`         the cluster view: answers requests, sends updates to clients that follow it
`event_stream`        the event log: answers requests, sends new events to clients that follow it
`log_reader`          bounded reads of log files, and requests for them that are pending
`full_disk_output`    standard output that survives a full disk
`failure_report`      text of the first failure
`exception_record`    description of the exception that ended a script
`chaos_faults`        faults of `covey chaos`: kill, stop, slow, cut, fill the disk, shift the clock
`lifeline`            kills a child's process group when the agent dies
`restart_backoff`     when a child process that exits early is restarted, and when it is not restarted any more
`linux`               parent-death signal, subreaper, child pids, connection owners, process title
"""
