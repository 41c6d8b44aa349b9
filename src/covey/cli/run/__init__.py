"""`covey run`: from options to a running cluster and its exit code.

`options`       the options, as a table
`plan`          options and environment to a plan
`slurm`         the plan's parts that a Slurm step determines
`dry_run`       describes a plan
`command`       runs a plan
`display`       live table on the terminal
`log_echo`      which rank's log reaches the terminal
`event_hooks`   --on-event
"""
