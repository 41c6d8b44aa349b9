"""The template: a process from which an agent forks its Python children, such as workers.

It has imported modules that the script is expected to use, such as torch, so that a child does not import them itself.

`fork_server`       the template process; forks on request
`client`            the agent's side: starts and restarts the template, requests forks
`protocol`          messages between the two, and the description of a child
`child_bootstrap`   what a forked child does before the script's first line
`script_loader`     runs a script or module as `__main__`
`import_recorder`   records which modules the first child imports, for the template to import
`thread_counts`     OpenMP and BLAS threads of a forked child
"""
