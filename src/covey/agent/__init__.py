"""The agent: covey's process on a host, parent of the workers there.

`agent`                  registers the host, starts the children that the scheduler requests, reports their exits
`children`               starts, watches and ends child processes
`relay`                  forwards messages between the children and the scheduler over the agent's one connection
`worker_environment`     environment variables of a child: torchrun's, MindSpore's and covey's
`scheduler_supervisor`   runs the scheduler and its standbys as child processes
"""
