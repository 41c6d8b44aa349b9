"""What must outlive a process: the scheduler's journal, atomic files, the registry of this user's running clusters.

Not here: when to write. The core says so with `Persist`, and the shells obey before they send.
"""
