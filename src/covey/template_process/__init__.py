"""The template: a process that has imported torch and the script's modules, and from which workers are forked.

`fork_server`       the template process; forks on request
`client`            the agent's side: starts and restarts the template, requests forks
`protocol`          messages between the two, and the description of a child
`child_bootstrap`   what a forked child does before the script's first line
`script_loader`     runs a script or module as `__main__`
`import_recorder`   records which modules a script imports, for the next template
`thread_counts`     OpenMP and BLAS threads of a forked child
"""
