"""`covey.init()` in a process of role MS_PSERVER: it serves rows of parameters."""

from __future__ import annotations

import functools
import threading
from typing import NoReturn

import msgspec

from covey.core.messages import RankResumed, ServerInSync
from covey.core.parameter_server.settings import ServingSettings, parse_mode
from covey.core.parameter_server.sharding import SLOTS, initial_sharding
from covey.errors import PeerError, UsageError
from covey.log import log
from covey.parameter_server import discovery
from covey.parameter_server.server import ParameterServer
from covey.settings import Settings
from covey.training.node_interface import GenerationStarted
from covey.worker.membership_thread import GenerationChanged, MembershipThread


def make_serving_settings(settings: Settings) -> ServingSettings | None:
    """Return the serving settings of the cluster; None if it has no parameter servers. Raises `UsageError` for more than
    `SLOTS` servers."""
    if not settings.server_num:
        return None
    if settings.server_num > SLOTS:
        raise UsageError(f"MS_SERVER_NUM={settings.server_num} is invalid: expected at most {SLOTS} parameter servers")
    mode, staleness = parse_mode(settings.ps_mode)
    return ServingSettings(
        servers=settings.server_num,
        workers=settings.worker_num,
        mode=mode,
        staleness=staleness,
        copies=settings.ps_copies,
        refuse_nan=settings.ps_nan == "refuse",
        message_max=settings.ps_message_max,
    )


def run_parameter_server(node: MembershipThread, settings: Settings) -> NoReturn:
    """Serve until the membership thread ends this process. Raises `PeerError` if this server was restarted and its rows are
    lost."""
    assignment = node.assignment
    serving = make_serving_settings(msgspec.structs.replace(settings, worker_num=assignment.workers))
    assert serving is not None
    server = ParameterServer(
        node.address,
        serving,
        assignment.rank,
        assignment.restarts,
        functools.partial(discovery.find_server, node),
        assignment.sharding,
        lambda version: node.send_to_scheduler(ServerInSync(version)),
    )
    threading.Thread(target=_recover_rows, args=(server, node), name="covey recovery", daemon=True).start()
    copies = serving.copies if assignment.world > 1 else 0  # a single server has no replica holder
    log.info("server %d of %d, %s, replicas: %d", assignment.rank, assignment.world, settings.ps_mode, copies)
    while True:
        message = node.inbox.get()
        if isinstance(message, PeerError):
            raise message
        server.set_sharding(node.assignment.sharding or initial_sharding(serving.servers))
        if isinstance(message, GenerationStarted):
            try:
                discovery.publish_endpoint(node, assignment.rank, server.endpoint, message.generation)
            except GenerationChanged:  # superseded: the next generation is in the inbox
                continue


def _recover_rows(server: ParameterServer, node: MembershipThread) -> None:
    try:
        server.recover()
    except PeerError as error:
        node.inbox.put(error)
        return
    if node.assignment.restarts:
        node.send_to_scheduler(RankResumed(node.assignment.generation, -1))
