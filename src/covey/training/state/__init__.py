"""Training state: what it consists of, and how it reaches a replacement or a spare.

`training_state`      model, optimizer and registered objects; snapshots
`state_manager`       hand-over of the state from a survivor to a replacement, and to and from checkpoints
`transfer`            state and cached results over a connection
`process_memory`      reads tensors from another rank on this host (process_vm_readv)
`spare_sync`          a spare copies tensors in the background
`grad_accumulation_detector` detects gradients that are kept across steps
`pytree`              state as plain data and tensors
"""
