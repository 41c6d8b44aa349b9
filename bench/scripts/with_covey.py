"""A first all-reduce by covey's own functions; each rank writes the times of its stages to a file."""

import json
import os
import sys
import time
from pathlib import Path

started = time.monotonic()

import torch  # noqa: E402

import covey  # noqa: E402

imported = time.monotonic()
covey.init()
joined = time.monotonic()
total = covey.all_reduce(torch.ones(1))
ready = time.monotonic()
assert total.item() == covey.get_group_size()

folder = Path(sys.argv[1])
stamp = {"pid": os.getpid(), "started": started, "imported": imported, "joined": joined, "ready": ready}
part = folder / f"{covey.get_rank()}.part"
part.write_text(json.dumps(stamp))
part.rename(part.with_suffix(".json"))
while (folder / "hold").exists():  # the benchmark measures this process while the file exists
    time.sleep(0.05)
