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
from covey.parameter_server.server import Server
from covey.settings import Settings
from covey.training.worker_context import Regroup
from covey.worker.membership_thread import Generation, Node


def serving_of(settings: Settings) -> ServingSettings | None:
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


def serve(node: Node, settings: Settings) -> NoReturn:
    """Serve until the cluster ends, which ends this process. Raises `PeerError` if the rows are lost."""
    place = node.place
    serving = serving_of(msgspec.structs.replace(settings, worker_num=place.workers))
    assert serving is not None
    server = Server(node.address, serving, place.rank, place.restarts, functools.partial(discovery.find, node), place.sharding)
    server.on_settled = lambda version: node.say(ServerInSync(version))
    threading.Thread(target=_recover, args=(server, node), name="covey recovery", daemon=True).start()
    copies = serving.copies if place.world > 1 else 0  # one server alone has nobody to hold its copy
    log.info("server %d of %d, %s, copies: %d", place.rank, place.world, settings.ps_mode, copies)
    while True:
        news = node.inbox.get()
        if isinstance(news, PeerError):
            raise news
        server.share(node.place.sharding or initial_sharding(serving.servers))
        if isinstance(news, Regroup):
            try:
                discovery.pin(node, place.rank, server.peer, news.generation)
            except Generation:  # it is over already, and the next one is in the inbox
                continue


def _recover(server: Server, node: Node) -> None:
    try:
        server.recover()
    except PeerError as error:
        node.inbox.put(error)
        return
    if node.place.restarts:
        node.say(RankResumed(node.place.generation, -1))
