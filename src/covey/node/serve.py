"""A scheduler as a process: sockets, journal, REST port and registry entry around `Scheduler`, from the settings alone.

`python -m covey.node.serve` is what an agent starts; `covey.init()` calls `serve` in a process whose role is MS_SCHED.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

import msgspec

from covey import context
from covey.core.effects import End
from covey.core.model import ClusterSettings
from covey.core.recovery import ladder
from covey.errors import CoveyError, UsageError
from covey.node import security
from covey.node.log import configure, log
from covey.node.scheduler import Place, Scheduler, exit_now, on_signal, raise_file_limit
from covey.settings import Loaded, Settings, load, require_raw
from covey.store import registry
from covey.store.journal import Journal, open_journal
from covey.wire import address

KEPT_VARIABLE = "COVEY_KEPT"
REPLACEMENTS_MAX = 32767  # per host, as the seeds' max_restarts


class Kept(msgspec.Struct, frozen=True):
    """What an agent gives the scheduler it keeps alive, as JSON in `KEPT_VARIABLE`."""

    sockets: tuple[list[int], list[int]]  # descriptors of the bound sockets it hands over: the cluster's, the REST port's
    journal: str  # the folder from which a restarted one goes on
    log_dir: str = ""
    max_restarts: int = 0


class Sockets(msgspec.Struct, frozen=True):
    """Where the cluster and the REST API listen; no REST sockets: it is off."""

    cluster: list[socket.socket]
    manage: list[socket.socket]

    @property
    def address(self) -> str:
        host, port, *_ = self.cluster[0].getsockname()
        return address.join(host, port)

    @property
    def manage_port(self) -> int:
        return int(self.manage[0].getsockname()[1]) if self.manage else 0


def cluster_settings(settings: Settings, max_restarts: int = 0) -> ClusterSettings:
    """What the core needs of the effective settings."""
    return ClusterSettings(
        worker_num=settings.worker_num,
        server_num=settings.server_num,
        recovery=settings.recovery,
        topo_timeout_s=settings.topo_timeout_s,
        node_timeout_s=settings.node_timeout_s,
        beats=not settings.disable_heartbeat,
        max_restarts=max_restarts,
        replacements_max=max_restarts or REPLACEMENTS_MAX,
        strategies=ladder(settings.strategy.split(",")),
        stuck_s=settings.stuck_s,
        extra_ranks=settings.extra_ranks,
        grace_s=settings.grace_s,
        copies=settings.ps_copies,
    )


def bind(settings: Settings, *, manage_given: bool) -> Sockets:
    """Listen at MS_SCHED_HOST and MS_SCHED_PORT, and at the REST port on loopback and on the same host."""
    host = address.bare(settings.sched_host)
    try:
        cluster = address.listen(host, settings.sched_port, "MS_SCHED_HOST")
    except address.NotLocal:
        if address.family(host) is not None:
            raise
        log.warning("the name %s belongs to no address of this host (a service?): listening at all addresses", host)
        host = "0.0.0.0"
        cluster = address.listen(host, settings.sched_port, "MS_SCHED_HOST")
    return Sockets(cluster, bind_manage(settings.manage_port, host, strict=manage_given))


def bind_manage(port: int, host: str, *, strict: bool) -> list[socket.socket]:
    """The REST port: always on loopback, and on the cluster's own address if that is another one."""
    if port == 0:
        return []
    try:
        found = address.listen("127.0.0.1", max(port, 0), "MS_SCHED_MANAGE_PORT")
    except UsageError as error:
        if strict:
            raise
        log.warning("%s; the REST port was not given by you, so a free one is used", error)
        return bind_manage(-1, host, strict=True)
    port = found[0].getsockname()[1]
    if host in ("0.0.0.0", "::"):
        found[0].close()
        return address.listen(host, port, "MS_SCHED_MANAGE_PORT")
    if not address.is_loopback(host) or (host.startswith("127.") and host != "127.0.0.1"):
        found += address.listen(host, port, "MS_SCHED_MANAGE_PORT")
    return found


def serve(loaded: Loaded, *, sockets: Sockets | None = None, kept: Kept | None = None) -> int:
    """Run a scheduler until its cluster has ended; returns the code to end with. `kept`: it is an agent's child."""
    settings = loaded.settings
    if sockets is None:
        sockets = bind(settings, manage_given=loaded.origins.get("manage_port") != "default")
    raise_file_limit()
    guard = security.find(settings, listens_at=address.split(sockets.address)[0])
    job = settings.job or str(Path(sys.argv[0]).resolve())
    folder = kept.journal if kept is not None else (settings.recovery_path if settings.recovery else "")
    journal = _journal(settings, folder, job)
    place = Place(
        address=sockets.address,
        host=socket.gethostname(),
        node_id=settings.node_id or "sched",
        manage_port=sockets.manage_port,
        log_dir=kept.log_dir if kept is not None else "",
        job=job,
    )
    scheduler = Scheduler(
        cluster_settings(settings, kept.max_restarts if kept is not None else 0),
        place,
        cluster_id=uuid.uuid4().hex[:12],
        secret=guard.secret,
        context=guard.server,
        journal=journal,
    )
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            end = runner.run(_run(scheduler, sockets, settings, guard, comes_back=settings.recovery or kept is not None))
    finally:
        if journal is not None:
            journal.close()
    return end.code


def _journal(settings: Settings, folder: str, job: str) -> Journal | None:
    if not folder:
        return None
    return open_journal(folder, job=job, worker_num=settings.worker_num, server_num=settings.server_num)


async def _run(
    scheduler: Scheduler, sockets: Sockets, settings: Settings, guard: security.Security, *, comes_back: bool
) -> End:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, scheduler, number, comes_back)
    token = settings.token or secrets.token_urlsafe(24)
    serving = loop.create_task(scheduler.run(sockets.cluster))
    await asyncio.sleep(0)  # let it take over the journal: the cluster id may come from there
    entry = registry.add(
        registry.Entry(
            cluster_id=scheduler.cluster_id,
            address=sockets.address,
            pid=os.getpid(),
            created=registry.process_started(os.getpid()),
            secret=guard.secret,
            token=token,
            manage=address.join("127.0.0.1", sockets.manage_port) if sockets.manage else "",
            job=scheduler.place.job,
            log_dir=scheduler.place.log_dir,
            tls=settings.tls_config,
        )
    )
    log.info(
        "scheduler of cluster %s at %s%s",
        scheduler.cluster_id,
        sockets.address,
        manage_words(sockets, tls=guard.encrypts),
    )
    console = loop.create_task(_serve_console(scheduler, sockets, token, guard)) if sockets.manage else None
    try:
        return await serving
    finally:
        entry.unlink(missing_ok=True)
        if console is not None:
            console.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await console


async def _serve_console(scheduler: Scheduler, sockets: Sockets, token: str, guard: security.Security) -> None:
    """The REST port. Its imports take longer than forming a small cluster, so they happen beside the loop."""
    training, console = await asyncio.to_thread(_console_modules)
    server = console.Server(training.make_app(scheduler, token=token), sockets.manage, guard.server)
    try:
        await server.start()
    except OSError as error:
        log.error("the REST port cannot be served (%s): the cluster goes on without it", error)
        return
    try:
        await asyncio.Event().wait()
    finally:
        await server.stop()


def _console_modules() -> tuple[Any, Any]:
    from covey.console import server, training

    return training, server


def manage_words(sockets: Sockets, *, tls: bool) -> str:
    """Where the REST port is, for the first line a person reads."""
    if not sockets.manage:
        return ""
    return f", REST at {'https' if tls else 'http'}://127.0.0.1:{sockets.manage_port}"


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # an accelerator, never required
        return None
    return uvloop.Loop


def run_in_this_process(loaded: Loaded) -> None:
    """The role MS_SCHED of `covey.init()`: serve, and never return to the training code."""
    configure(loaded.settings, "scheduler")
    try:
        require_raw(loaded.settings)
        settings = loaded.settings
        port = int(context.get_ps_context("scheduler_manage_port"))
        if context.is_set("scheduler_manage_port"):
            origins = loaded.origins | {"manage_port": "set_ps_context"}
            loaded = Loaded(msgspec.structs.replace(settings, manage_port=port), origins)
        code = serve(loaded)
    except CoveyError as error:
        log.error("%s", error)
        code = error.exit_code
    exit_now(code)


def main() -> None:
    """The scheduler of `covey run`."""
    kept = msgspec.json.decode(os.environ.pop(KEPT_VARIABLE), type=Kept)
    cluster, manage = ([socket.socket(fileno=number) for number in group] for group in kept.sockets)
    try:
        loaded = load(os.environ)
        configure(loaded.settings, "scheduler")
        code = serve(loaded, sockets=Sockets(cluster, manage), kept=kept)
    except CoveyError as error:
        log.error("%s", error)
        code = error.exit_code
    exit_now(code)


if __name__ == "__main__":
    main()
