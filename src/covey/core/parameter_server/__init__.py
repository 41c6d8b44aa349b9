"""How the rows of parameters are distributed over parameter servers: what servers, workers and the scheduler must agree on.

`sharding`    slots, their owners and replica holders, and the moves from one sharding to the next
`settings`    synchronous or asynchronous updates, and the other settings that all processes must share
"""
