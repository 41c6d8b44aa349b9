"""Parts of covey in a process that executes the user's script, beside the training itself.

`membership_thread`       keeps the process a member of the cluster while the script trains
`process_exit`            exit codes, signals and the exception hook
`spare`                   waits for a rank, then takes over its variables and log
`parameter_server_role`   `covey.init()` in a process of role MS_PSERVER
`container_supervisor`    COVEY_SUPERVISE: forks the script and restarts it in a container
`stack_dump`              stacks of all threads, on a signal
`foreign_launchers`       ranks that torchrun, mpirun or srun gave to a process
"""
