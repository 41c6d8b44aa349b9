"""What runs inside a training process: the loop, its data and state, collectives, checkpoints.

torch is imported in this package only, and only when it is used.

    `loop`                `covey.Loop`; `loop_arguments` and `argument_checks` validate its arguments
    `model`               MindSpore-style `Model.train` with callbacks
    `ddp`                 stand-in for torch's DistributedDataParallel
    `gradient_reducer`    averages gradients in buckets during backward
    `sharded_optimizer`   optimizer state split over the ranks, with replicas (ZeRO-1 style)
    `ps_parameters`       parameters that parameter servers hold; `embedding` is a table of such rows
    `node_interface`      the interface between training code and its node
    `step_timer`          duration of steps, to find slow ranks
    `seeding`             seeds derived from (seed, step, rank)
    `lazy_torch`          imports torch on first use
    `data`                which samples a rank reads
    `collectives`         numbered, repeatable collectives
    `state`               training state and its transfer to a replacement
    `checkpoint`          checkpoint files
"""
