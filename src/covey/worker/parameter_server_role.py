"""A parameter server's shell: it keeps its place in the cluster, and tells every generation where it is."""

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
from covey.training.worker_context import GenerationStarted
from covey.worker.membership_thread import GenerationChanged, MembershipThread


def make_serving_settings(settings: Settings) -> ServingSettings | None:
    """How parameters are served in the cluster these settings describe; None where they are not."""
    if not settings.server_num:
        return None
    if settings.server_num > SLOTS:
        raise UsageError(f"MS_SERVER_NUM={settings.server_num} is not allowed: {SLOTS} parameter servers are the most")
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
    """Serve until the cluster ends, which ends this process. Raises `PeerError` if the rows are lost."""
    place = node.assignment
    serving = make_serving_settings(msgspec.structs.replace(settings, worker_num=place.workers))
    assert serving is not None
    server = ParameterServer(
        node.address,
        serving,
        place.rank,
        place.restarts,
        functools.partial(discovery.find_server, node),
        place.sharding,
        lambda version: node.send_to_scheduler(ServerInSync(version)),
    )
    threading.Thread(target=_recover_rows, args=(server, node), name="covey recovery", daemon=True).start()
    copies = serving.copies if place.world > 1 else 0  # one server alone has nobody to hold its copy
    log.info("server %d of %d, %s, copies: %d", place.rank, place.world, settings.ps_mode, copies)
    while True:
        news = node.inbox.get()
        if isinstance(news, PeerError):
            raise news
        server.set_sharding(node.assignment.sharding or initial_sharding(serving.servers))
        if isinstance(news, GenerationStarted):
            try:
                discovery.publish_endpoint(node, place.rank, server.endpoint, news.generation)
            except GenerationChanged:  # it is over already, and the next one is in the inbox
                continue


def _recover_rows(server: ParameterServer, node: MembershipThread) -> None:
    try:
        server.recover()
    except PeerError as error:
        node.inbox.put(error)
        return
    if node.assignment.restarts:
        node.send_to_scheduler(RankResumed(node.assignment.generation, -1))
