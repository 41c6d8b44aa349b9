"""Checkpoints of a training.

`checkpoint`   `covey.Checkpoint`: the directories of the ranks, which checkpoints they have and keep
`files`        the files of one checkpoint: tensors and manifest
`writer`       when a checkpoint is written, and what follows if that fails
`resume`       finds the newest checkpoint that any rank has, and gives it to all ranks
"""
