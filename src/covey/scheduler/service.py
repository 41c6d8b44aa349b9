"""A scheduler built from the settings, with its sockets, journal, REST port and registry entry.

Without standbys it runs once. With standbys it waits for the lease, runs while it leads, and waits again.
"""

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

from covey.core.effects import EndCluster
from covey.core.restart_limits import MAX_RESTARTS, replacement_limit
from covey.core.strategy_ladder import parse_strategies
from covey.core.types import ClusterSettings
from covey.errors import ExitCode, StoreError, UsageError
from covey.log import log
from covey.runtime import credentials, host_identity
from covey.runtime.child_environment import SchedulerHandoff
from covey.runtime.listeners import (
    ListeningSockets,
    bind_cluster_port,
    bind_management_port,
    bind_scheduler_ports,
    describe_management_port,
)
from covey.runtime.management_port import serve_management_port
from covey.scheduler.leader_commits import RETRY_DISK_S, LeadershipHandedOver, LeaderTerm, SteppedDown
from covey.scheduler.lease_keeper import LeaseKeeper, StandbyClusterEnded, kill_predecessor
from covey.scheduler.scheduler import Scheduler, SchedulerInfo, exit_now, on_signal
from covey.settings import LoadedSettings, Settings, serving_variables, settings_table
from covey.storage import running_clusters
from covey.storage.cas_journal import CasJournal, open_cas_journal
from covey.storage.cas_store import CasStore, FileCasStore, open_cas_store
from covey.storage.journal import FencedError, Journal, open_journal
from covey.transport import address

PORT_RELEASE_TIMEOUT_S = 10.0  # limit for the kernel to release the port of a killed process


class SchedulerService:
    """Construction and run of a scheduler, once per term if there are standbys. `sockets` are bound already; None: bind them
    when needed. `handoff` has the parameters from an agent or TaskD's manager; None: there is neither."""

    def __init__(self, loaded: LoadedSettings, sockets: ListeningSockets | None, handoff: SchedulerHandoff | None) -> None:
        settings = loaded.settings
        self._settings = settings
        self._settings_table = settings_table(loaded)
        self._manage_port_given = loaded.origins.get("manage_port") != "default"
        self._sockets = sockets
        self._handoff = handoff
        job = settings.job or (handoff.default_job if handoff is not None else "") or str(Path(sys.argv[0]).resolve())
        self._job = job.encode(errors="backslashreplace").decode()  # a path may not be valid UTF-8
        given = settings.recovery_path if settings.recovery or settings.lease else ""
        self._journal_folder = handoff.journal_folder if handoff is not None else given
        self._cluster_id = uuid.uuid4().hex[:12]
        self._rest_token = settings.token

    async def serve(self) -> int:
        """Run the only scheduler of a cluster; return the exit code of the cluster. Raises `CoveyError` if it cannot start or
        must not continue."""
        sockets = self._sockets or bind_scheduler_ports(self._settings, manage_given=self._manage_port_given)
        journal = self._open_local_journal() if self._journal_folder else None
        try:
            end = await self._run_scheduler(sockets, journal, None)
        finally:
            if journal is not None:
                journal.close()
        return end.code

    async def stand_by(self) -> int:
        """Run one of several schedulers: wait for the lease, lead while it lasts, and wait again. Return the exit code when the
        cluster has ended or this process has handed over the lease. Raises `CoveyError` if it cannot start or must not
        continue."""
        cas_store = open_cas_store(
            choose_lease_store(self._settings, self._journal_folder),
            folder=self._journal_folder,
            job=self._job,
            factories={"kubernetes": _open_kubernetes_store},
        )
        management_sockets = self._sockets.management if self._sockets is not None else self._bind_management_port()
        lease_keeper = LeaseKeeper(
            cas_store,
            where=self._management_url(management_sockets),
            cluster=self._join_addresses(),
            duration_s=self._settings.lease_s,
        )
        while True:
            for number in _exit_signals():
                asyncio.get_running_loop().add_signal_handler(number, exit_now, 128 + number)
            try:
                async with self._serve_leader_redirect(management_sockets, lease_keeper):
                    token = await lease_keeper.wait_until_leader()
                log.info("this scheduler leads, with fencing token %d", token)
                end = await self._run_as_leader(cas_store, lease_keeper, management_sockets, token)
            except SteppedDown as error:
                log.warning("%s: this scheduler steps down and stands by", error)
            except LeadershipHandedOver as handed_over:
                await lease_keeper.hand_over_lease()
                return handed_over.code
            except StandbyClusterEnded as ended:
                log.info("the cluster has ended: this standby exits")
                return ended.code
            else:
                await lease_keeper.record_cluster_end(end.code)
                return end.code

    async def _run_as_leader(
        self, cas_store: CasStore, lease_keeper: LeaseKeeper, management_sockets: list[socket.socket], token: int
    ) -> EndCluster:
        cluster_sockets = (
            self._sockets.cluster if self._sockets is not None else await self._bind_cluster_port(lease_keeper.predecessor)
        )
        sockets = ListeningSockets(_duplicate_sockets(cluster_sockets), _duplicate_sockets(management_sockets))
        try:
            journal = await self._open_leader_journal(cas_store, lease_keeper, token)
        except FencedError as error:
            lease_keeper.raise_token(error.newest_token)
            raise SteppedDown(str(error)) from None
        try:
            leads = functools.partial(lease_keeper.leads, token)
            return await self._run_scheduler(sockets, journal, LeaderTerm(token, leads, self._settings.lease_s))
        finally:
            journal.close()
            for sock in (*sockets.cluster, *sockets.management, *(cluster_sockets if self._sockets is None else ())):
                sock.close()

    async def _bind_cluster_port(self, predecessor: str) -> list[socket.socket]:
        try:
            return bind_cluster_port(self._settings)[0]
        except UsageError as error:
            if error.exit_code is not ExitCode.PORT_IN_USE or not kill_predecessor(predecessor):
                raise
        until = asyncio.get_running_loop().time() + PORT_RELEASE_TIMEOUT_S
        while True:
            try:
                return bind_cluster_port(self._settings)[0]
            except UsageError as error:
                if error.exit_code is not ExitCode.PORT_IN_USE or asyncio.get_running_loop().time() > until:
                    raise
            await asyncio.sleep(0.1)

    def _bind_management_port(self) -> list[socket.socket]:
        return bind_management_port(self._settings.manage_port, self._find_own_host(), strict=False)

    def _find_own_host(self) -> str:
        hosts = [host for host, _ in address.split_list(self._settings.sched_host, 0)]
        return next((host for host in hosts if address.is_local(host)), hosts[0])

    def _join_addresses(self) -> str:
        """Return the addresses of the schedulers of this cluster, which identify the cluster in the lease."""
        if self._sockets is not None and "," not in self._settings.sched_host:
            return self._sockets.address
        addresses = address.split_list(self._settings.sched_host, self._settings.sched_port)
        return ",".join(sorted(address.join_host_port(host, port) for host, port in addresses))

    def _management_url(self, management_sockets: list[socket.socket]) -> str:
        if not management_sockets:
            return ""
        scheme = "https" if self._settings.tls_config else "http"
        return f"{scheme}://{address.join_host_port(self._find_own_host(), int(management_sockets[0].getsockname()[1]))}"

    @contextlib.asynccontextmanager
    async def _serve_leader_redirect(
        self, management_sockets: list[socket.socket], lease_keeper: LeaseKeeper
    ) -> AsyncIterator[None]:
        """Redirect REST clients to the leader while the body runs. An inherited port is not served here, because the leader
        shares and serves it."""
        if not management_sockets or self._sockets is not None:
            yield
            return
        auth = credentials.load_credentials(self._settings, listens_at=self._find_own_host())
        async with serve_management_port(lambda: _make_standby_app(lease_keeper), _duplicate_sockets(management_sockets), auth):
            yield

    async def _open_leader_journal(self, cas_store: CasStore, lease_keeper: LeaseKeeper, token: int) -> Journal | CasJournal:
        """Open the journal of the new term. If a local one cannot be opened, kill a previous leader that still runs on this
        host and try once more. Raises `FencedError` if the journal has a higher token, `StoreError` if it is not usable, and
        `SteppedDown` if the lease is lost while a remote store fails."""
        settings, follows = self._settings, bool(lease_keeper.predecessor)
        if isinstance(cas_store, FileCasStore):
            try:
                return self._open_local_journal(token, follows=follows)
            except StoreError as error:
                if isinstance(error, FencedError) or not kill_predecessor(lease_keeper.predecessor):
                    raise
                return self._open_local_journal(token, follows=follows)
        size = {"worker_num": settings.worker_num, "server_num": settings.server_num}
        while True:
            try:
                return await open_cas_journal(cas_store, token=token, job=self._job, follows=follows, **size)
            except StoreError as error:
                if isinstance(error, FencedError) or error.exit_code is ExitCode.BAD_JOURNAL:
                    raise
                if not lease_keeper.leads(token):
                    raise SteppedDown(str(error)) from None
                log.warning("%s: retrying to open the journal", error)
                await asyncio.sleep(RETRY_DISK_S)

    def _open_local_journal(self, token: int = 0, *, follows: bool = False) -> Journal:
        size = {"worker_num": self._settings.worker_num, "server_num": self._settings.server_num}
        return open_journal(self._journal_folder, job=self._job, token=token, follows=follows, **size)

    async def _run_scheduler(
        self, sockets: ListeningSockets, journal: Journal | CasJournal | None, term: LeaderTerm | None
    ) -> EndCluster:
        settings, handoff = self._settings, self._handoff
        auth = credentials.load_credentials(settings, listens_at=address.split_host_port(sockets.address)[0])
        self._rest_token = self._rest_token or _derive_rest_token(auth.secret)
        info = SchedulerInfo(
            address=sockets.address,
            host=socket.gethostname(),
            host_id=host_identity.describe_host(settings.host_id, "").id,
            node_id=settings.node_id or "sched",
            manage_port=sockets.manage_port,
            log_dir=handoff.log_dir if handoff is not None else "",
            job=self._job,
        )
        scheduler = Scheduler(
            make_cluster_settings(
                settings,
                handoff.max_restarts if handoff is not None else MAX_RESTARTS,
                agents_return=handoff is None or handoff.agents_return,
            ),
            info,
            cluster_id=self._cluster_id,
            secret=auth.secret,
            context=auth.server_context,
            journal=journal,
            term=term,
        )
        loop = asyncio.get_running_loop()
        restartable = settings.recovery or handoff is not None or term is not None
        for number in _exit_signals():
            loop.add_signal_handler(number, on_signal, scheduler, number, restartable)
        serving = loop.create_task(scheduler.run(sockets.cluster))
        await asyncio.sleep(0)  # let it read the journal, which may contain the cluster id
        entry = self._register_cluster(scheduler, sockets, auth)
        rest_port = describe_management_port(sockets, tls=auth.uses_tls)
        log.info("scheduler of cluster %s at %s%s", scheduler.cluster_id, sockets.address, rest_port)
        app = functools.partial(_make_training_app, scheduler, self._rest_token, self._settings_table)
        async with serve_management_port(app, sockets.management, auth):
            try:
                return await serving
            finally:
                entry.unlink(missing_ok=True)

    def _register_cluster(self, scheduler: Scheduler, sockets: ListeningSockets, auth: credentials.Credentials) -> Path:
        return running_clusters.register_cluster(
            running_clusters.RegistryEntry(
                cluster_id=scheduler.cluster_id,
                address=sockets.address,
                pid=os.getpid(),
                created=running_clusters.process_start_time(os.getpid()),
                secret=auth.secret,
                token=self._rest_token,
                manage=address.join_host_port("127.0.0.1", sockets.manage_port) if sockets.management else "",
                job=scheduler.info.job,
                log_dir=scheduler.info.log_dir,
                journal=self._journal_folder,
                tls=self._settings.tls_config,
            )
        )


def _open_kubernetes_store(name: str) -> CasStore:
    from covey.kubernetes.cas_store import KubernetesCasStore  # here, because other schedulers do not need the client

    return KubernetesCasStore.from_name(name)


def choose_lease_store(settings: Settings, folder: str) -> str:
    """Return the lease store: COVEY_LEASE, or `file` if that is not set. Raises `UsageError` if the lease would be in files and
    there is no journal directory `folder`."""
    store = settings.lease or ("file" if folder else "")
    if not store or (store.startswith("file") and not folder):
        raise UsageError(
            "several schedulers need a lease store: set COVEY_LEASE=etcd://HOST:PORT, or, if they share a disk,"
            " COVEY_LEASE=file and MS_RECOVERY_PATH"
        )
    return store


def make_cluster_settings(
    settings: Settings, max_restarts: int = MAX_RESTARTS, *, agents_return: bool = True
) -> ClusterSettings:
    """Return the settings of the scheduler's state machine."""
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
        replacements_max=replacement_limit(max_restarts),
        strategies=parse_strategies(settings.strategy.split(",")),
        stuck_s=settings.stuck_s,
        extra_ranks=settings.extra_ranks,
        grace_s=settings.grace_s,
        copies=settings.ps_copies,
        serving=serving_variables(settings),
        worker_max=settings.worker_max,
        last_call_s=settings.last_call_s,
        shrink_after_s=settings.shrink_after_s,
    )


def _derive_rest_token(secret: str) -> str:
    """Return the token of the REST port: derived from the secret by HMAC, so that all schedulers of a cluster use the same one,
    or random if there is no secret."""
    return hmac.digest(secret.encode(), b"covey REST", "sha256").hex()[:32] if secret else secrets.token_urlsafe(24)


def _exit_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that a scheduler handles; none outside the main thread, where no handler can be installed."""
    return (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()


def _make_training_app(scheduler: Scheduler, token: str, settings: list[tuple[str, str, str, str]]) -> Any:
    from covey.management import training_api

    return training_api.make_app(scheduler, token=token, settings=settings)


def _make_standby_app(lease_keeper: LeaseKeeper) -> Any:
    from covey.management import leader_redirect

    return leader_redirect.make_app(lambda: lease_keeper.leader_url)


def _duplicate_sockets(sockets: list[socket.socket]) -> list[socket.socket]:
    """Return duplicates, which can be closed at the end of a term while the originals stay open."""
    return [sock.dup() for sock in sockets]
