"""Scheduler process of a federated cluster.

`scheduler`        sockets, record and clock around `covey.core.federated.federation_machine`
`management_api`   its REST API
"""
