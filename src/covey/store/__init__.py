"""What must outlive a process: the scheduler's `journal`; `cells` that several processes may change, in files or in etcd, and a
`shared_journal` in one of them; the `registry` of this user's running clusters; the join `secret`.

Not here: when to write. The core says so with `Persist`, and the shells obey before they send.
"""
