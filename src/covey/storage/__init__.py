"""Storage that outlives a process. The core decides when to write (`Persist`).

`journal`            the scheduler's journal, in SQLite
`cas_journal`        the same in one compare-and-swap value, for several schedulers
`cas_store`          named compare-and-swap values, in files or in etcd
`cluster_registry`   running clusters of this user on this host
`join_secret`        the secret that nodes of a cluster share
`tempdirs`           temporary directories, removed when the process that made them exits
"""
