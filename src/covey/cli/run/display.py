"""Display of `covey run` and `covey top`: a live table or plain lines, and echoed logs; also the node table and log reader of
other commands."""

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

from covey.cli.scheduler_session import SchedulerSession
from covey.core.cluster.view import ClusterView, NodeView
from covey.core.incidents import Outcome
from covey.core.types import NodeState, Phase, Role
from covey.errors import PeerError
from covey.log import escape_unprintable
from covey.runtime.node_runtime import SchedulerAddress

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

POLL_INTERVAL_S: Final = 0.1  # between two reads of a log, or two attempts to connect to the scheduler
ROWS_MAX: Final = 32  # nodes in a table
CHUNK_BYTES_MAX: Final = 1 << 20  # of one read


class LineFilter(Protocol):
    """Filter of a log: `feed` takes a line and returns the lines to print now, `flush` returns the lines still held back."""

    def feed(self, line: str) -> list[str]: ...
    def flush(self) -> list[str]: ...


class LiveDisplay:
    """Display of a cluster's changes, messages and echoed logs, from `open` until `close`.

    There is a live table below the lines if `live` is True, `as_json` is False and stdout is a terminal. `reconnect_timeout_s`
    limits the seconds for which the scheduler may be unreachable.
    """

    def __init__(
        self, scheduler: SchedulerAddress, *, live: bool, as_json: bool = False, reconnect_timeout_s: float = math.inf
    ) -> None:
        self._scheduler_address = scheduler
        self._reconnect_timeout_s = reconnect_timeout_s
        self._uses_terminal = live and not as_json and sys.stdout.isatty()
        self._as_json = as_json
        self._live_table: Any = None
        self._follow_task: asyncio.Task[None] | None = None
        self._tail_tasks: dict[str, asyncio.Task[None]] = {}
        self._node_states: dict[str, str] = {}
        self._last_recovery = 0  # number of the newest incident that was printed
        self._last_full_restart = ""  # description of the newest one that was printed
        self._last_phase: tuple[str, int, float] = ("", 0, 0)  # phase, generation and refused registrations printed last
        self._closing = False

    def open(self) -> None:
        """Start the live table, if there is one, and a task that follows the cluster."""
        if self._uses_terminal:
            from rich.live import Live
            from rich.spinner import Spinner

            self._live_table = Live(
                Spinner("dots", "starting: importing the script's modules"), transient=True, refresh_per_second=8
            )
            self._live_table.start()
        self._follow_task = asyncio.create_task(self._follow_view())

    async def follow_until_ended(self) -> None:
        """Open, follow a running cluster until it has ended, and close.

        Raise PeerError if the scheduler stays unreachable, and UsageError if it refuses.
        """
        self.open()
        assert self._follow_task is not None
        try:
            await self._follow_task
        finally:
            await self.close()

    async def close(self) -> None:
        """Print the rest of the echoed logs, stop following the cluster and remove the live table."""
        self._closing = True
        for tail in self._tail_tasks.values():
            await tail
        if self._follow_task is not None:
            self._follow_task.cancel()
            await asyncio.gather(self._follow_task, return_exceptions=True)
        if self._live_table is not None:
            self._live_table.stop()

    def print_message(self, text: str) -> None:
        """Print a message of covey, with the prefix "covey: " or, with `as_json`, as a line of JSON."""
        self._print_line(
            msgspec.json.encode({"message": text}).decode() if self._as_json else f"covey: {escape_unprintable(text)}"
        )

    def _print_rank_line(self, rank: int, prefix: str, text: str) -> None:
        """Print a line of a rank's log, only the text after its last carriage return: the last state of a progress bar."""
        text = text.rpartition("\r")[2]
        self._print_line(msgspec.json.encode({"rank": rank, "line": text}).decode() if self._as_json else prefix + text)

    def _print_line(self, text: str) -> None:
        """Print a line, above the live table if there is one. If that fails, discard this and all further output.

        Without a table and with a finite `reconnect_timeout_s` (`covey top`), raise OSError instead.
        """
        if self._live_table is None and self._reconnect_timeout_s < math.inf:
            return print(text, flush=True)  # covey top exits on a broken pipe; a run continues
        if self._live_table is None:
            return write_line(text, sys.stdout)
        try:
            self._live_table.console.print(text, markup=False, highlight=False, soft_wrap=True)
        except OSError:
            discard_output(sys.stdout)
        return None

    def echo_log(self, path: str, rank: int, prefix: str, offset: int, line_filter: LineFilter) -> None:
        """Echo a rank's log from this byte offset, as it grows, until `close`. Do nothing if the log is echoed already."""

        def echo(lines: list[str]) -> None:
            for line in lines:
                self._print_rank_line(rank, prefix, line)

        async def follow() -> None:
            await follow_file(path, lambda line: echo(line_filter.feed(line)), lambda: self._closing, offset)
            echo(line_filter.flush())

        if path not in self._tail_tasks:
            self._tail_tasks[path] = asyncio.create_task(follow())

    async def _follow_view(self) -> None:
        clock = asyncio.get_running_loop().time
        seen_at = clock()
        while True:
            try:
                async with SchedulerSession(self._scheduler_address) as session:
                    async for view in session.follow_views():
                        self._show_view(view)
                        if view.phase is Phase.ENDED:
                            return
                    seen_at = clock()
            except PeerError:
                if clock() - seen_at > self._reconnect_timeout_s:
                    raise
            await asyncio.sleep(POLL_INTERVAL_S)

    def _show_view(self, view: ClusterView) -> None:
        for text in self._describe_changes(view):
            self.print_message(text)
        if self._live_table is not None:
            self._live_table.update(render_cluster(view, rows=max(4, self._live_table.console.height // 2)))

    def _describe_changes(self, view: ClusterView) -> Iterable[str]:
        refused = (
            view.counters.get("refused", 0) if view.phase is Phase.FORMING else 0
        )  # shown, because the other nodes wait for the refused one
        if (view.phase, view.generation, refused) != self._last_phase:
            again = f" (restart {view.restarts}, generation {view.generation})" if view.restarts else ""
            self._last_phase = (view.phase, view.generation, refused)
            yield f"{view.phase}: {view.reason}{again}"
        if view.full_restart is not None and str(view.full_restart) != self._last_full_restart:
            self._last_full_restart = str(view.full_restart)
            if view.phase is not Phase.ENDED:  # the reason of the end includes it
                yield self._last_full_restart
        for incident in view.recoveries:
            if incident.outcome is not Outcome.OPEN and incident.number > self._last_recovery:
                self._last_recovery = incident.number
                yield str(incident)
        for node in view.nodes if view.phase is not Phase.ENDED else ():
            if node.role is not Role.SCHEDULER and self._node_states.get(node.name, "alive") != node.state and node.rank >= 0:
                verb = "has" if node.state == NodeState.LEFT else "is"
                yield f"{'rank' if node.role is Role.WORKER else node.role} {node.rank} on {node.host} {verb} {node.state}"
            self._node_states[node.name] = node.state


class ThreadedDisplay:
    """A `LiveDisplay` on its own thread, so that a blocked stdout (a paused pager) stalls the display and not the run."""

    def __init__(self, display: LiveDisplay) -> None:
        self._display = display
        self._loop = asyncio.new_event_loop()

    def open(self) -> None:
        threading.Thread(target=self._loop.run_forever, name="covey-show", daemon=True).start()
        self._loop.call_soon_threadsafe(self._display.open)

    def print_message(self, text: str) -> None:
        self._loop.call_soon_threadsafe(self._display.print_message, text)

    def echo_log(self, path: str, rank: int, prefix: str, offset: int, line_filter: LineFilter) -> None:
        self._loop.call_soon_threadsafe(self._display.echo_log, path, rank, prefix, offset, line_filter)

    async def close(self) -> None:
        """Close the display, which prints the rest of the logs, then stop the thread. This does not return while stdout is
        blocked."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._display.close(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)


def write_line(text: str, stream: TextIO) -> None:
    """Print a line. If that fails (a broken pipe, a full disk), discard this and all further output of the stream."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        discard_output(stream)


def discard_output(stream: TextIO) -> None:
    """Redirect the stream's file descriptor to /dev/null, so that its unwritten buffer is discarded too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def cluster_heading(view: ClusterView) -> str:
    """Return the cluster's id, phase, generation and headline in one line."""
    return f"covey {view.cluster_id} · {view.phase} · generation {view.generation} · {escape_unprintable(view.headline)}"


def render_cluster(view: ClusterView, rows: int) -> Group:
    """Return the live display of a cluster: heading, table of at most `rows` nodes and, if any, the newest recovery."""
    from rich.console import Group
    from rich.text import Text

    lines: list[RenderableType] = [
        Text(cluster_heading(view), style="bold", no_wrap=True, overflow="ellipsis"),
        render_node_table(view, rows),
    ]
    if view.recoveries:
        lines.append(Text(f"recoveries: {len(view.recoveries)}, newest: {view.recoveries[-1]}", style="dim"))
    return Group(*lines)


def render_node_table(view: ClusterView, rows: int = ROWS_MAX) -> Table:
    """Return the table of at most `rows` nodes, without the scheduler, ordered by role and rank.

    If there are more nodes, those that are not alive and low ranks are preferred, and the caption counts the omitted nodes.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(pad_edge=False, box=None)
    for name in NODE_COLUMNS:
        table.add_column(name, justify="right" if name in ("rank", "step", "beat", "restarts") else "left")
    nodes = sorted((n for n in view.nodes if n.role is not Role.SCHEDULER), key=lambda n: (n.alive, n.rank))
    shown = nodes[:rows]
    for node in sorted(shown, key=lambda n: (n.role, n.rank)):
        cells = map(Text, node_cells(node))  # Text, because names must not be parsed as markup
        table.add_row(*cells, style=STATE_STYLES.get(node.state, ""))
    if len(nodes) > len(shown):
        table.caption = f"and {len(nodes) - len(shown)} more"
    return table


NODE_COLUMNS = ("rank", "role", "host", "state", "step", "doing", "beat", "restarts")
STATE_STYLES = {"dead": "red", "suspect": "yellow", "waiting": "dim", "left": "dim"}


def node_cells(node: NodeView) -> list[str]:
    """Return the cells of a node for `NODE_COLUMNS`; "-" for a value that is unknown."""
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


class LogTail:
    """Reader of the new lines of a growing file."""

    def __init__(self, path: str, offset: int = 0) -> None:
        self._path = Path(path)
        self._position = offset
        self._partial_line = b""

    def read(self, *, end: bool = False) -> list[str]:
        """Return the complete lines since the last call; with `end`, also an incomplete last line. The file may be missing.

        A file that has become shorter is read again from its beginning. Bytes that are not UTF-8 are replaced.
        """
        found: list[bytes] = []
        if self._path.is_file():
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._position:
                    self._position, self._partial_line = 0, b""  # the file was truncated or replaced
                file.seek(self._position)
                while piece := file.read(CHUNK_BYTES_MAX):
                    self._position += len(piece)
                    *lines, self._partial_line = (self._partial_line + piece).split(b"\n")
                    found += lines
        if end and self._partial_line:
            found.append(self._partial_line)
        return [text.decode("utf-8", "replace") for text in found]


async def follow_file(path: str, line: Callable[[str], None], closing: Callable[[], bool], offset: int = 0) -> None:
    """Call `line` for each line of a file from this byte offset, as the file grows.

    When `closing` returns True, read the rest, also an incomplete last line, and return.
    """
    tail = LogTail(path, offset)
    while True:
        last = closing()
        for text in tail.read(end=last):
            line(text)
        if last:
            return
        await asyncio.sleep(POLL_INTERVAL_S)
