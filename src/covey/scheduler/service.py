"""A scheduler from the settings: its sockets, journal, REST port and registry entry, for as long as it leads."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import os
import secrets
import signal
import socket
import sys
import threading
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from covey.core.cluster.recovery_strategy import parse_strategies
from covey.core.effects import EndCluster
from covey.core.types import ClusterSettings
from covey.errors import ExitCode, StoreError, UsageError
from covey.log import log
from covey.runtime import credentials, host_identity
from covey.runtime.listeners import Sockets, bind, bind_cluster, bind_manage, manage_words
from covey.runtime.management_port import managed
from covey.scheduler.journal_commits import RETRY_DISK_S, HandedOver, SteppedDown, Term
from covey.scheduler.lease_keeper import Leading, Over, end_predecessor
from covey.scheduler.scheduler import Place, Scheduler, exit_now, on_signal
from covey.settings import Loaded, Settings, rows, serving_said
from covey.storage import cluster_registry
from covey.storage.cas_journal import SharedJournal, open_shared
from covey.storage.cas_store import Cells, FileCells, open_cells
from covey.storage.journal import Fenced, Journal, open_journal
from covey.transport import address

PORT_S = 10.0  # the kernel has to let go of a port whose holder was killed
REPLACEMENTS_MAX = 32767  # per host, as MindSpore's max_restarts


class Kept(msgspec.Struct, frozen=True):
    """What an agent gives the scheduler it keeps alive, as JSON in `KEPT_VARIABLE`."""

    sockets: tuple[list[int], list[int]]  # descriptors of the bound sockets it hands over: the cluster's, the REST port's
    journal: str  # the folder from which a restarted one goes on
    log_dir: str = ""
    called: str = ""  # the cluster, where nobody gave the job a name
    max_restarts: int = 0
    agents_return: bool = True
    agent: int = 0  # its pid, where it is the parent: with it, this one ends


class Office:
    """What a scheduler is made from, each time this process becomes one."""

    def __init__(self, loaded: Loaded, sockets: Sockets | None, kept: Kept | None) -> None:
        settings = loaded.settings
        self._settings = settings
        self._rows = rows(loaded)
        self._manage_given = loaded.origins.get("manage_port") != "default"
        self._sockets = sockets
        self._kept = kept
        job = settings.job or (kept.called if kept is not None else "") or str(Path(sys.argv[0]).resolve())
        self._job = job.encode(errors="backslashreplace").decode()  # a path may be bytes that are no text
        given = settings.recovery_path if settings.recovery or settings.lease else ""
        self._folder = kept.journal if kept is not None else given
        self._cluster_id = uuid.uuid4().hex[:12]
        self._token = settings.token

    async def serve(self) -> int:
        """The only scheduler of its cluster."""
        sockets = self._sockets or bind(self._settings, manage_given=self._manage_given)
        journal = self._local_journal() if self._folder else None
        try:
            end = await self._run(sockets, journal, None)
        finally:
            if journal is not None:
                journal.close()
        return end.code

    async def stand_by(self) -> int:
        """One of several schedulers: wait until this one leads, act while it does, and wait again."""
        cells = open_cells(lease_store(self._settings, self._folder), folder=self._folder, job=self._job)
        manage = self._sockets.manage if self._sockets is not None else self._bind_manage()
        leading = Leading(cells, where=self._where(manage), cluster=self._addresses(), duration_s=self._settings.lease_s)
        while True:
            for number in _signals():
                asyncio.get_running_loop().add_signal_handler(number, exit_now, 128 + number)
            try:
                async with self._tells_where(manage, leading):
                    token = await leading.win()
                log.info("this scheduler leads, by token %d", token)
                end = await self._lead(cells, leading, manage, token)
            except SteppedDown as error:
                log.warning("%s: this scheduler leads no longer, and stands by", error)
            except HandedOver as asked:
                await leading.hand_over()
                return asked.code
            except Over as over:
                log.info("the cluster has ended: this scheduler need not stand by any more")
                return over.code
            else:
                await leading.end(end.code)
                return end.code

    async def _lead(self, cells: Cells, leading: Leading, manage: list[socket.socket], token: int) -> EndCluster:
        found = self._sockets.cluster if self._sockets is not None else await self._bind_cluster(leading.predecessor)
        sockets = Sockets(_copies(found), _copies(manage))
        try:
            journal = await self._leaders_journal(cells, leading, token)
        except Fenced as error:
            leading.outbid(error.newest)
            raise SteppedDown(str(error)) from None
        try:
            leads = functools.partial(leading.leads, token)
            return await self._run(sockets, journal, Term(token, leads, self._settings.lease_s))
        finally:
            journal.close()
            for sock in (*sockets.cluster, *sockets.manage, *(found if self._sockets is None else ())):
                sock.close()

    async def _bind_cluster(self, predecessor: str) -> list[socket.socket]:
        try:
            return bind_cluster(self._settings)[0]
        except UsageError as error:
            if error.exit_code is not ExitCode.PORT_IN_USE or not end_predecessor(predecessor):
                raise
        until = asyncio.get_running_loop().time() + PORT_S
        while True:
            try:
                return bind_cluster(self._settings)[0]
            except UsageError as error:
                if error.exit_code is not ExitCode.PORT_IN_USE or asyncio.get_running_loop().time() > until:
                    raise
            await asyncio.sleep(0.1)

    def _bind_manage(self) -> list[socket.socket]:
        """At once, since a standby answers there too. A port that another scheduler of this host has is no reason to fail."""
        return bind_manage(self._settings.manage_port, self._own_host(), strict=False)

    def _own_host(self) -> str:
        hosts = [host for host, _ in address.several(self._settings.sched_host, 0)]
        return next((host for host in hosts if address.is_local(host)), hosts[0])

    def _addresses(self) -> str:
        """Where the schedulers of this cluster are, by which each of them knows the others from strangers."""
        if self._sockets is not None and "," not in self._settings.sched_host:
            return self._sockets.address
        found = address.several(self._settings.sched_host, self._settings.sched_port)
        return ",".join(sorted(address.join(host, port) for host, port in found))

    def _where(self, manage: list[socket.socket]) -> str:
        """This scheduler's REST port, for those who ask another."""
        if not manage:
            return ""
        scheme = "https" if self._settings.tls_config else "http"
        return f"{scheme}://{address.join(self._own_host(), int(manage[0].getsockname()[1]))}"

    @contextlib.asynccontextmanager
    async def _tells_where(self, manage: list[socket.socket], leading: Leading) -> AsyncIterator[None]:
        """While this one stands by, its REST port says where the leader's is. One that both share is the leader's alone."""
        if not manage or self._sockets is not None:
            yield
            return
        guard = credentials.find(self._settings, listens_at=self._own_host())
        async with managed(lambda: _standby_app(leading), _copies(manage), guard):
            yield

    async def _leaders_journal(self, cells: Cells, leading: Leading, token: int) -> Journal | SharedJournal:
        """A store that does not answer now is waited for as long as this one leads: it is no reason for a standby to end."""
        settings, follows = self._settings, bool(leading.predecessor)
        if isinstance(cells, FileCells):
            try:
                return self._local_journal(token, follows=follows)
            except StoreError as error:
                if isinstance(error, Fenced) or not end_predecessor(leading.predecessor):
                    raise
                return self._local_journal(token, follows=follows)
        size = {"worker_num": settings.worker_num, "server_num": settings.server_num}
        while True:
            try:
                return await open_shared(cells, token=token, job=self._job, follows=follows, **size)
            except StoreError as error:
                if isinstance(error, Fenced) or error.exit_code is ExitCode.BAD_JOURNAL:
                    raise
                if not leading.leads(token):
                    raise SteppedDown(str(error)) from None
                log.warning("%s; the journal is tried again", error)
                await asyncio.sleep(RETRY_DISK_S)

    def _local_journal(self, token: int = 0, *, follows: bool = False) -> Journal:
        size = {"worker_num": self._settings.worker_num, "server_num": self._settings.server_num}
        return open_journal(self._folder, job=self._job, token=token, follows=follows, **size)

    async def _run(self, sockets: Sockets, journal: Journal | SharedJournal | None, term: Term | None) -> EndCluster:
        settings, kept = self._settings, self._kept
        guard = credentials.find(settings, listens_at=address.split(sockets.address)[0])
        self._token = self._token or _rest_token(guard.secret)
        place = Place(
            address=sockets.address,
            host=socket.gethostname(),
            host_id=host_identity.here(settings.host_id, "").id,
            node_id=settings.node_id or "sched",
            manage_port=sockets.manage_port,
            log_dir=kept.log_dir if kept is not None else "",
            job=self._job,
        )
        scheduler = Scheduler(
            cluster_settings(
                settings,
                kept.max_restarts if kept is not None else 0,
                agents_return=kept is None or kept.agents_return,
            ),
            place,
            cluster_id=self._cluster_id,
            secret=guard.secret,
            context=guard.server,
            journal=journal,
            term=term,
        )
        loop = asyncio.get_running_loop()
        comes_back = settings.recovery or kept is not None or term is not None
        for number in _signals():
            loop.add_signal_handler(number, on_signal, scheduler, number, comes_back)
        serving = loop.create_task(scheduler.run(sockets.cluster))
        await asyncio.sleep(0)  # let it take over the journal: the cluster id may come from there
        entry = self._enter(scheduler, sockets, guard)
        manage = manage_words(sockets, tls=guard.encrypts)
        log.info("scheduler of cluster %s at %s%s", scheduler.cluster_id, sockets.address, manage)
        app = functools.partial(_training_app, scheduler, self._token, self._rows)
        async with managed(app, sockets.manage, guard):
            try:
                return await serving
            finally:
                entry.unlink(missing_ok=True)

    def _enter(self, scheduler: Scheduler, sockets: Sockets, guard: credentials.Security) -> Path:
        """Into the registry, where commands on this host find their cluster."""
        return cluster_registry.add(
            cluster_registry.Entry(
                cluster_id=scheduler.cluster_id,
                address=sockets.address,
                pid=os.getpid(),
                created=cluster_registry.process_started(os.getpid()),
                secret=guard.secret,
                token=self._token,
                manage=address.join("127.0.0.1", sockets.manage_port) if sockets.manage else "",
                job=scheduler.place.job,
                log_dir=scheduler.place.log_dir,
                journal=self._folder,
                tls=self._settings.tls_config,
            )
        )


def lease_store(settings: Settings, folder: str) -> str:
    """Where several schedulers agree who leads: what COVEY_LEASE says, else the journal's folder."""
    store = settings.lease or ("file" if folder else "")
    if not store or (store.startswith("file") and not folder):
        raise UsageError(
            "several schedulers must agree who leads: set COVEY_LEASE=etcd://HOST:PORT, or, where they share a disk,"
            " COVEY_LEASE=file and MS_RECOVERY_PATH"
        )
    return store


def cluster_settings(settings: Settings, max_restarts: int = 0, *, agents_return: bool = True) -> ClusterSettings:
    """What the core needs of the effective settings."""
    return ClusterSettings(
        worker_num=settings.worker_num,
        server_num=settings.server_num,
        job=settings.job,
        recovery=settings.recovery,
        agents_return=agents_return,
        topo_timeout_s=settings.topo_timeout_s,
        node_timeout_s=settings.node_timeout_s,
        heartbeats_enabled=not settings.disable_heartbeat,
        max_restarts=max_restarts,
        replacements_max=max_restarts or REPLACEMENTS_MAX,
        strategies=parse_strategies(settings.strategy.split(",")),
        stuck_s=settings.stuck_s,
        extra_ranks=settings.extra_ranks,
        grace_s=settings.grace_s,
        copies=settings.ps_copies,
        serving=serving_said(settings),
        worker_max=settings.worker_max,
        last_call_s=settings.last_call_s,
        shrink_after_s=settings.shrink_after_s,
    )


def _rest_token(secret: str) -> str:
    """The REST port's token. Made of the secret, without giving it away, so that all schedulers of a cluster have the same."""
    return hmac.digest(secret.encode(), b"covey REST", "sha256").hex()[:32] if secret else secrets.token_urlsafe(24)


def _signals() -> tuple[signal.Signals, ...]:
    """Those that end a scheduler; in a thread they belong to the program that runs it there."""
    return (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()


def _training_app(scheduler: Scheduler, token: str, settings: list[tuple[str, str, str, str]]) -> Any:
    from covey.management import training_api

    return training_api.make_app(scheduler, token=token, settings=settings)


def _standby_app(leading: Leading) -> Any:
    from covey.management import standby_api

    return standby_api.make_app(lambda: leading.where)


def _copies(sockets: list[socket.socket]) -> list[socket.socket]:
    """Descriptors of the same sockets: what is closed when a scheduler steps down is needed when it leads again."""
    return [sock.dup() for sock in sockets]
