"""A first all-reduce, like in any script for torchrun; each rank writes the times of its stages to a file."""

import json
import os
import sys
import time
from pathlib import Path

started = time.monotonic()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

imported = time.monotonic()
dist.init_process_group("gloo")
joined = time.monotonic()
total = torch.ones(1)
dist.all_reduce(total)
ready = time.monotonic()
assert total.item() == dist.get_world_size()

folder = Path(sys.argv[1])
stamp = {"pid": os.getpid(), "started": started, "imported": imported, "joined": joined, "ready": ready}
part = folder / f"{dist.get_rank()}.part"
part.write_text(json.dumps(stamp))
part.rename(part.with_suffix(".json"))
while (folder / "hold").exists():  # the benchmark measures this process while the file exists
    time.sleep(0.05)
dist.destroy_process_group()
