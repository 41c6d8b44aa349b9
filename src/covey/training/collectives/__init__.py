"""Collectives that are numbered and can be repeated after a failure.

`numbered`       numbers each collective, waits in it while the cluster heals, then repeats it or receives its result
`repeatable_operations` all_reduce, broadcast, all_gather, mean
`communicator`   interface for scripts; builds no group if the world size is 1 and cannot grow
`group`          interface of a transport: the group of one generation
`gloo_group`     the gloo transport
`result_cache`   results that other ranks may need after a failure
"""
