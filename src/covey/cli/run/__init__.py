"""`covey run`: from options to a running cluster and its exit code.

`options`       table and parser of the options
`plan`          makes a plan from options, settings and environment
`slurm`         number of hosts, host index and scheduler address in a Slurm job step
`dry_run`       describes a plan
`command`       runs a plan
`display`       live table or lines on the terminal
`log_echo`      which ranks' logs are printed on the terminal
`event_hooks`   --on-event: sends events to a command or URL
"""
