"""Collectives that are numbered and can be repeated after a failure.

`numbered`       numbers each collective, waits in it while the cluster heals, repeats it in the next generation
`operations`     all_reduce, broadcast, all_gather, mean
`communicator`   what a script calls; without network if the world size is 1
`group`          interface of a transport: the group of one generation
`gloo_group`     the gloo transport
`result_cache`   results that other ranks may need after a failure
"""
