"""Checkpoints of a training.

`checkpoint`   `covey.Checkpoint`: the checkpoint directory of one rank
`files`        tensors and manifest of one step
`writer`       when a checkpoint is written, and what follows if that fails
`resume`       finds the newest checkpoint that all ranks have
"""
