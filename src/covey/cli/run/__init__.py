"""`covey run`: from options to a running cluster and its exit code.

`options`       the options, as a table
`plan`          options and environment to a plan
`slurm`         number of hosts, host index and scheduler address in a Slurm job step
`dry_run`       describes a plan
`command`       runs a plan
`display`       live table or lines on the terminal
`log_echo`      which ranks' logs are printed on the terminal
`event_hooks`   --on-event: sends events to a command or URL
"""
