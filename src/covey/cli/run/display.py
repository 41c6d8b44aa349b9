"""What `covey run` shows while it runs: a live table on a terminal, plain lines anywhere else, and the ranks' own output."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TextIO

import msgspec

from covey.cli.scheduler_client import Visit
from covey.core.cluster.view import ClusterView, NodeView
from covey.core.incidents import Outcome
from covey.core.types import NodeState, Phase, Role
from covey.errors import PeerError
from covey.log import escape_unprintable
from covey.runtime.node_runtime import SchedulerAddress

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

LOOK_S: Final = 0.1  # how often logs are looked at for new lines
ROWS_MAX: Final = 32
PIECE_MAX: Final = 1 << 20


class LineFilter(Protocol):
    """Decides which lines of a log are printed."""

    def feed(self, line: str) -> list[str]: ...
    def flush(self) -> list[str]: ...


class Show:
    """Follows a cluster until it is closed."""

    def __init__(self, door: SchedulerAddress, *, live: bool, as_json: bool = False, patience_s: float = math.inf) -> None:
        self._door = door
        self._patience_s = patience_s
        self._terminal = live and not as_json and sys.stdout.isatty()
        self._json = as_json
        self._live: Any = None
        self._task: asyncio.Task[None] | None = None
        self._tails: dict[str, asyncio.Task[None]] = {}
        self._states: dict[str, str] = {}
        self._recovery = 0  # the newest that was told
        self._full_restart = ""  # the newest that was printed
        self._phase: tuple[str, int, float] = ("", 0, 0)
        self._closing = False

    def open(self) -> None:
        """Begin to follow."""
        if self._terminal:
            from rich.live import Live
            from rich.spinner import Spinner

            self._live = Live(
                Spinner("dots", "starting: the script's imports come first"), transient=True, refresh_per_second=8
            )
            self._live.start()
        self._task = asyncio.create_task(self._follow())

    async def watch(self) -> None:
        """Follow a cluster that is there already, until it has ended or its scheduler stays away."""
        self.open()
        assert self._task is not None
        try:
            await self._task
        finally:
            await self.close()

    async def close(self) -> None:
        """Print what is left of the logs and give the terminal back."""
        self._closing = True
        for tail in self._tails.values():
            await tail
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A word of covey's own."""
        self._line(msgspec.json.encode({"message": text}).decode() if self._json else f"covey: {escape_unprintable(text)}")

    def _echo(self, rank: int, prefix: str, text: str) -> None:
        """A line that a rank printed; of a progress bar, what is left of it."""
        text = text.rpartition("\r")[2]
        self._line(msgspec.json.encode({"rank": rank, "line": text}).decode() if self._json else prefix + text)

    def _line(self, text: str) -> None:
        """Above the table where there is one."""
        if self._live is None and self._patience_s < math.inf:
            return print(text, flush=True)  # who only looks goes when nobody reads any more
        if self._live is None:
            return put(text, sys.stdout)
        try:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        except OSError:
            hush(sys.stdout)
        return None

    def tail(self, path: str, rank: int, prefix: str, first: int, chosen: LineFilter) -> None:
        """Echo a rank's log from a byte on, as it grows; one that is echoed already is not echoed twice."""

        def echo(lines: list[str]) -> None:
            for line in lines:
                self._echo(rank, prefix, line)

        async def follow() -> None:
            await follow_file(path, lambda line: echo(chosen.feed(line)), lambda: self._closing, first)
            echo(chosen.flush())

        if path not in self._tails:
            self._tails[path] = asyncio.create_task(follow())

    async def _follow(self) -> None:
        """Until the cluster has ended. A scheduler that is starting, or away, is looked for again."""
        clock = asyncio.get_running_loop().time
        seen_at = clock()
        while True:
            try:
                async with Visit(self._door) as visit:
                    async for view in visit.follow():
                        self._update(view)
                        if view.phase is Phase.ENDED:
                            return
                    seen_at = clock()
            except PeerError:
                if clock() - seen_at > self._patience_s:
                    raise
            await asyncio.sleep(LOOK_S)

    def _update(self, view: ClusterView) -> None:
        for text in self._changes(view):
            self.say(text)
        if self._live is not None:
            self._live.update(drawing(view, rows=max(4, self._live.console.height // 2)))

    def _changes(self, view: ClusterView) -> Iterable[str]:
        refused = view.counters.get("refused", 0) if view.phase is Phase.FORMING else 0  # others wait for who was
        if (view.phase, view.generation, refused) != self._phase:
            again = f" (restart {view.restarts}, generation {view.generation})" if view.restarts else ""
            self._phase = (view.phase, view.generation, refused)
            yield f"{view.phase}: {view.reason}{again}"
        if view.full_restart is not None and str(view.full_restart) != self._full_restart:
            self._full_restart = str(view.full_restart)
            if view.phase is not Phase.ENDED:  # the end's reason includes it
                yield self._full_restart
        for incident in view.recoveries:
            if incident.outcome is not Outcome.OPEN and incident.number > self._recovery:
                self._recovery = incident.number
                yield str(incident)
        for node in view.nodes if view.phase is not Phase.ENDED else ():
            if node.role is not Role.SCHEDULER and self._states.get(node.name, "alive") != node.state and node.rank >= 0:
                verb = "has" if node.state == NodeState.LEFT else "is"
                yield f"{'rank' if node.role is Role.WORKER else node.role} {node.rank} on {node.host} {verb} {node.state}"
            self._states[node.name] = node.state


class Aside:
    """A show in a thread of its own: where nobody reads what is printed, the show stands still and the run does not."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._loop = asyncio.new_event_loop()

    def open(self) -> None:
        threading.Thread(target=self._loop.run_forever, name="covey-show", daemon=True).start()
        self._loop.call_soon_threadsafe(self._show.open)

    def say(self, text: str) -> None:
        self._loop.call_soon_threadsafe(self._show.say, text)

    def tail(self, path: str, rank: int, prefix: str, first: int, chosen: LineFilter) -> None:
        self._loop.call_soon_threadsafe(self._show.tail, path, rank, prefix, first, chosen)

    async def close(self) -> None:
        """Once everything is printed."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._show.close(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)


def put(text: str, stream: TextIO) -> None:
    """A line of a run's. Where nobody reads any more, or the disk is full, the run goes on without."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        hush(stream)


def hush(stream: TextIO) -> None:
    """What is written there from now on, and what could not be, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def heading(view: ClusterView) -> str:
    """The cluster in one line."""
    return f"covey {view.cluster_id} · {view.phase} · generation {view.generation} · {escape_unprintable(view.headline)}"


def drawing(view: ClusterView, rows: int) -> Group:
    """What a terminal shows of a cluster while it runs: its heading, as far as it fits, its nodes, its newest recovery."""
    from rich.console import Group
    from rich.text import Text

    lines: list[RenderableType] = [Text(heading(view), style="bold", no_wrap=True, overflow="ellipsis"), table(view, rows)]
    if view.recoveries:
        lines.append(Text(f"recoveries {len(view.recoveries)}, the newest: {view.recoveries[-1]}", style="dim"))
    return Group(*lines)


def table(view: ClusterView, rows: int = ROWS_MAX) -> Table:
    """rank, host, state, step, beat, restarts; at most a screenful, the troubled ones first."""
    from rich.table import Table
    from rich.text import Text

    made = Table(pad_edge=False, box=None)
    for name in COLUMNS:
        made.add_column(name, justify="right" if name in ("rank", "step", "beat", "restarts") else "left")
    nodes = sorted((n for n in view.nodes if n.role is not Role.SCHEDULER), key=lambda n: (n.alive, n.rank))
    shown = nodes[:rows]
    for node in sorted(shown, key=lambda n: (n.role, n.rank)):
        made.add_row(*map(Text, row(node)), style=STYLES.get(node.state, ""))  # as it is said: a host's name is no markup
    if len(nodes) > len(shown):
        made.caption = f"and {len(nodes) - len(shown)} more"
    return made


COLUMNS = ("rank", "role", "host", "state", "step", "doing", "beat", "restarts")
STYLES = {"dead": "red", "suspect": "yellow", "waiting": "dim", "left": "dim"}


def row(node: NodeView) -> list[str]:
    """A node as cells of a table with these `COLUMNS`."""
    return [
        str(node.rank) if node.rank >= 0 else "-",
        node.role,
        escape_unprintable(node.host),
        node.state,
        str(node.step) if node.step >= 0 else "-",
        escape_unprintable(node.phase or "-") + (f", {node.straggles:.1f} x the usual time" if node.straggles else ""),
        f"{node.beat_age_s:.1f} s" if node.beat_age_s >= 0 else "-",
        str(node.restarts),
    ]


class Tail:
    """New lines of a growing file; a line counts once it is complete, or at the `end`."""

    def __init__(self, path: str, first: int = 0) -> None:
        self._path = Path(path)
        self._position = first
        self._rest = b""

    def read(self, *, end: bool = False) -> list[str]:
        found: list[bytes] = []
        if self._path.is_file():
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._position:
                    self._position, self._rest = 0, b""  # somebody emptied it, or removed it and another was begun
                file.seek(self._position)
                while piece := file.read(PIECE_MAX):
                    self._position += len(piece)
                    *lines, self._rest = (self._rest + piece).split(b"\n")
                    found += lines
        if end and self._rest:
            found.append(self._rest)
        return [text.decode("utf-8", "replace") for text in found]


async def follow_file(path: str, line: Callable[[str], None], closing: Callable[[], bool], first: int = 0) -> None:
    """Lines of a file from a byte on, as they are written; after `closing`, what is left and then the end."""
    tail = Tail(path, first)
    while True:
        last = closing()
        for text in tail.read(end=last):
            line(text)
        if last:
            return
        await asyncio.sleep(LOOK_S)
