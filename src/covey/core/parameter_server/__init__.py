"""Distribution of parameter rows over parameter servers, on which servers, workers and the scheduler agree.

`sharding`    slots, their owners and replica holders, and the moves from one sharding to the next
`settings`    when updates become visible (synchronous, asynchronous, bounded), and the other settings of parameter serving
"""
