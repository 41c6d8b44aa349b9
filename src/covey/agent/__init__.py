"""The agent: covey's process on a host, parent of the workers there.

`agent`                  registers the host, starts what the scheduler asks for, reports exits
`children`               starts, watches and ends child processes
`relay`                  carries the messages of all children over the agent's one connection to the scheduler
`worker_environment`     environment variables of a worker: torchrun's and MS_*
`scheduler_supervisor`   scheduler and standbys as child processes
"""
