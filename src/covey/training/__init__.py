"""Code that runs inside a training process: the loop, its data and state, collectives, checkpoints.

torch is imported on first use, so a script without training code runs without it.

    `loop`                `covey.Loop`; `loop_arguments` validates its arguments
    `argument_checks`     checks of the arguments that a script passes
    `model`               MindSpore-style `Model.train` with callbacks
    `ddp`                 stand-in for torch's DistributedDataParallel
    `gradient_reducer`    averages gradients in buckets during backward
    `sharded_optimizer`   optimizer state split over the ranks, with replicas (ZeRO-1 style)
    `ps_parameters`       parameters that parameter servers hold; `embedding` is a table of such rows
    `node_interface`      the interface between training code and its node
    `step_timer`          time per step that a rank spends outside collectives, to find slow ranks
    `seeding`             deterministic seeds, and seeding of the random generators
    `lazy_torch`          imports torch on first use
    `data`                the samples that a rank reads
    `collectives`         numbered, repeatable collectives
    `state`               training state and its transfer to a replacement
    `checkpoint`          checkpoint files
"""
