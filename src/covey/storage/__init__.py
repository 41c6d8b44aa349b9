"""Storage in files, SQLite and etcd.

`journal`            the scheduler's journal, in SQLite
`cas_journal`        the journal in one compare-and-swap value, for schedulers on several hosts
`cas_store`          named compare-and-swap values, in files or in etcd
`running_clusters`   running clusters of this user on this host
`join_secret`        the secret that nodes of a cluster share
`tempdirs`           temporary directories, and the removal of abandoned ones
"""
