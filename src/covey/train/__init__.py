"""Inside a training process: the loop, its data and state, the group and its collectives. The only room that imports torch, and
only when used.

    programs'     `loop`, `model` (MindSpore's manner), `group`, `wrapped`; `loop_arguments`, `arguments` judge what is given
    data          `data`, `loaders` or `stream`, shared out by `course`; `walk` is one rank on it, `chance` its random numbers
    gradients     `reducer`, or `sharded` where the optimizer's state is cut, or `served` and `embedding` on parameter servers
    collectives   `collectives` that heal, of `operations`, over one `gloo` group for each generation; `kept` are their
                  results, `meeting` is what they need of the node, `pace` says who is slow
    state         `state` as plain data in a `tree`, with gradients where they are `carried`; `handover` to a replacement by
                  `transfer` and `pull`, to a spare by `following`
    the disk      `checkpoint` of `checkpoint_files`, written by `keeping`, found again by `resume`
"""
