"""Decisions, and nothing else.

Here lives what covey decides: who is a member, who has which rank, when the cluster is complete, when a node is dead, what
happens then. Decisions take events and `now` and return effects and a reason.

Not here: sockets, files, clocks, randomness, asyncio, torch. If a test of something here needs a sleep or a patch, the
decision is in the wrong room.
"""
