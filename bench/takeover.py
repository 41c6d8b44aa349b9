"""Time from the loss of the leading scheduler until its standby leads and all members are connected: `covey run --standbys 1`.

The leader is killed (SIGKILL), terminated (SIGTERM) and stopped (SIGSTOP), with the lease in a file and, if it is installed, in
etcd. The time begins with the signal and ends with the first view of a ready cluster that another process leads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.cluster import _free_port
from bench.formation import BIN
from bench.process import take_along
from bench.report import Aim, Spread, aims_table, machine, publish, spread, table
from covey.cli.scheduler_session import fetch_view
from covey.core.types import Phase
from covey.errors import PeerError
from covey.runtime.node_runtime import SchedulerAddress

ROOT = Path(__file__).parents[1]
WORLD, LEASE_S, SLACK_S, LIMIT_S = 4, 5.0, 1.0, 60.0
TAIL = 40  # lines of each log to print if no scheduler leads in time
SECRET = "of this benchmark"
HOW = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM, "stopped": signal.SIGSTOP}
SCRIPT = "import time, covey\ncovey.init()\ntime.sleep(3600)\n"


@contextlib.contextmanager
def etcd(folder: Path) -> Iterator[str]:
    """Run etcd and yield its URL for COVEY_LEASE; "" if it is not installed."""
    found = shutil.which("etcd", path=os.pathsep.join([str(ROOT / ".kubernetes"), os.environ.get("PATH", "")]))
    if found is None:
        yield ""
        return
    url, peers = (f"http://127.0.0.1:{_free_port()}" for _ in range(2))
    words = [found, "--data-dir", str(folder / "data"), "--listen-client-urls", url, "--advertise-client-urls", url]
    words += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield url.replace("http", "etcd")
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def cluster(folder: Path, lease: str) -> Iterator[SchedulerAddress]:
    """Run a cluster of four workers, a leader and a standby."""
    (folder / "train.py").write_text(SCRIPT)
    port = _free_port()
    variables = {"COVEY_LEASE": lease, "COVEY_LEASE_TIME": f"{LEASE_S:g}", "COVEY_SECRET": SECRET, "COVEY_JOB": folder.name}
    variables |= {"XDG_RUNTIME_DIR": str(folder), "XDG_CONFIG_HOME": str(folder)}
    words = [str(BIN / "covey"), "run", "-n", str(WORLD), "--standbys", "1", "--master", f"127.0.0.1:{port}"]
    words += ["--log-dir", str(folder / "logs"), str(folder / "train.py")]
    with (folder / "output").open("wb") as output:
        run = subprocess.Popen(words, env=os.environ | variables, stdout=output, stderr=output)
    try:
        yield SchedulerAddress("127.0.0.1", port, SECRET)
    except TimeoutError:
        for path in (folder / "output", *sorted((folder / "logs").rglob("scheduler*.log"))):
            print(f"--- {path.name}", *path.read_text().splitlines()[-TAIL:], sep="\n", file=sys.stderr)
        raise
    finally:
        run.send_signal(signal.SIGINT)
        try:
            run.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()


async def leader(address: SchedulerAddress, other_than: int = 0) -> int:
    """Wait until the cluster is ready and its leader is not `other_than`; return the leader's pid."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(PeerError):
                view = await fetch_view(address)
                pid = next(node.pid for node in view.nodes if node.role == "scheduler")
                if view.phase is Phase.READY and pid != other_than:
                    return pid
            await asyncio.sleep(0.01)


async def take_over(address: SchedulerAddress, how: signal.Signals) -> float:
    pid = await leader(address)
    await asyncio.sleep(2 * LEASE_S / 5)  # until the standby has read the leader's lease
    began = time.monotonic()
    os.kill(pid, how)
    try:
        await leader(address, other_than=pid)
        taken = time.monotonic() - began
        print(f"{how.name}: {taken:.2f} s", file=sys.stderr, flush=True)
        return taken
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def measure(times: int, *, quick: bool) -> dict[str, dict[str, list[float]]]:
    """Return seconds by lease store and by signal."""
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="covey-bench-", ignore_cleanup_errors=True) as name, etcd(Path(name)) as where:
        for store in filter(None, ("file", "" if quick else where)):
            folder = Path(name) / store[:4]
            folder.mkdir()
            with cluster(folder, store) as address:
                found[store[:4]] = {
                    word: [asyncio.run(take_over(address, how)) for _ in range(times)] for word, how in HOW.items()
                }
    return found


def show(found: dict[str, dict[str, list[float]]]) -> tuple[list[Aim], str]:
    worst = max(seconds for ways in found.values() for measured in ways.values() for seconds in measured)
    limit = LEASE_S + SLACK_S
    aim = Aim("the standby leads, all members are connected", f"within {limit:g} s", f"at worst {worst:.2f} s", worst <= limit)
    rows = [[store, *(spread(ways[word]).show(" s") for word in HOW)] for store, ways in found.items()]
    return [aim], table(["lease in", *HOW], rows)


def draw(found: dict[str, dict[str, list[float]]]) -> Any:
    def on(figure: Any) -> None:
        axes = figure.subplots()
        names = [f"{store}, {word}" for store in found for word in HOW]
        medians: list[Spread] = [spread(found[store][word]) for store in found for word in HOW]
        axes.barh(names, [s.median for s in medians])
        axes.axvline(LEASE_S, linestyle="--", color="black")
        axes.set_xlabel(f"seconds until the standby leads and all members are connected; the lease lasts {LEASE_S:g} s")

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each signal once, with the lease in a file only")
    parser.add_argument("--times", type=int, default=0, help="repeats of each signal (5; 1 with --quick)")
    options = parser.parse_args()
    times = options.times or (1 if options.quick else 5)
    about = machine()
    found = measure(times, quick=options.quick)
    aims, rows = show(found)
    data = {
        "machine": about,
        "quick": options.quick,
        "lease_s": LEASE_S,
        "found": found,
        "aims": [aim._asdict() for aim in aims],
    }
    publish("takeover", data, [aims_table(aims), rows], draw(found))


if __name__ == "__main__":
    take_along()
    main()
