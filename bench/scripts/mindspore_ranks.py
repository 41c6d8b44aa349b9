"""One MindSpore process of a dynamic cluster: records when it has its rank, then does a number of all-reduces."""

import os
import sys
import time

started = time.monotonic()

import mindspore  # type: ignore[import-not-found]  # noqa: E402
from mindspore import ops  # noqa: E402
from mindspore.communication import get_rank, init  # type: ignore[import-not-found]  # noqa: E402
from stamps import Stamps  # type: ignore[import-not-found]  # noqa: E402

mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
init()
if os.environ["MS_ROLE"] == "MS_WORKER":
    stamps = Stamps(sys.argv[1], get_rank(), started)
    stamps.add("joined")
    reduce = mindspore.jit(ops.AllReduce())
    for step in range(int(sys.argv[2])):
        reduce(mindspore.Tensor([1.0])).asnumpy()
        stamps.add("step", step)
        time.sleep(0.1)
