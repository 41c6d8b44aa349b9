"""Distribution of parameter rows over parameter servers, on which servers, workers and the scheduler agree.

`sharding`    slots, their owners and replica holders, and the moves from one sharding to the next
`settings`    synchronous or asynchronous updates, and the other settings that all processes must share
"""
