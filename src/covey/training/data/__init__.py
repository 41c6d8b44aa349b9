"""Which samples a rank reads, as a function of seed, step and rank.

`loader`             `covey.Data`: the batches of this rank
`torch_dataloader`   converts a torch DataLoader into a `covey.Data`
`stream`             iterable datasets
`sample_schedule`    which samples belong to which step and rank, across changes of the world size
`cursor`             the position of one rank on the schedule
"""
