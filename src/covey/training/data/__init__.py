"""Data of a training: which samples a rank reads in each step, and their loading.

`loader`             `covey.Data`: a data set, and the batches of this rank
`torch_dataloader`   converts a torch DataLoader into a `covey.Data`
`stream`             iterable data sets
`sample_schedule`    which samples belong to which step and rank, across changes of the world size
`cursor`             the position of one rank in the schedule
"""
