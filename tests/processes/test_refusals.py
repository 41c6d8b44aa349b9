"""Who is not let in: at once, with the reason at the refused node and in the scheduler's log, while everyone else goes on."""

from __future__ import annotations

import os
import socket
import ssl
import sys

import pytest
from tests.processes.fakes import listener
from tests.processes.harness import Cluster, Process, nodes_of, until

from covey.core.messages import PROTOCOL, Message, Register, RendezvousPut
from covey.core.types import Host, Phase, Role
from covey.transport.framing import encode_frame

# Nothing here may be explained by a timeout running out.
PATIENT = {"MS_TOPO_TIMEOUT": 1800, "MS_NODE_TIMEOUT": 1800, "MS_RECEIVE_MSG_TIMEOUT": 1800}
ANYWHERE = Host("somewhere", "somewhere", "127.0.0.1")


@pytest.fixture
def patient(cluster: Cluster) -> Cluster:
    cluster.env |= PATIENT
    return cluster


def refused(scheduler: Process, node: Process, *words: str) -> None:
    """The node ended with the code of a refusal, and both sides say why in the same words."""
    assert node.wait() == 21, node.tail()
    assert "Traceback" not in node.text()
    assert [line for line in node.text().splitlines() if line.startswith("covey: ")] == node.text().splitlines()[-1:]
    for word in words:
        assert word in node.text()
        scheduler.wait_for(word)


def finishes(cluster: Cluster, *refused: Process) -> None:
    """Everyone else ends well."""
    cluster.release()
    codes = cluster.wait()
    assert {name for name, code in codes.items() if code} == {process.name for process in refused}


# -- nodes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node_id", [None, "extra"])
def test_worker_beyond_world_is_refused(patient: Cluster, node_id: str | None) -> None:
    scheduler, _ = patient.formed()
    extra = patient.worker(node_id, name="extra")
    refused(scheduler, extra, r"one worker too many: the cluster already has 2", "worker:0, worker:1")
    finishes(patient, extra)


def test_one_worker_too_many_while_the_servers_are_missing(patient: Cluster) -> None:
    """The cluster is still forming, but it has all of its workers."""
    patient.workers = 1
    patient.env["MS_SERVER_NUM"] = 1
    scheduler = patient.scheduler()
    patient.worker("a")
    patient.until(lambda v: nodes_of(v), "the first worker to be registered")
    extra = patient.worker("b")
    refused(scheduler, extra, "one worker too many")
    patient.node("MS_SERVER", 0)
    finishes(patient, extra)


def test_a_rank_beyond_the_last(patient: Cluster) -> None:
    scheduler = patient.scheduler()
    beyond = patient.worker(7)
    refused(scheduler, beyond, "MS_NODE_ID=7 claims rank 7", "end at 1")
    patient.worker(0)
    patient.worker(1)
    finishes(patient, beyond)


def test_a_rank_claimed_twice_in_two_spellings(patient: Cluster) -> None:
    scheduler = patient.scheduler()
    patient.worker("0")
    patient.until(lambda v: nodes_of(v), "the first worker to be registered")
    second = patient.worker("00")
    refused(scheduler, second, "rank 0 is taken by worker:0")
    patient.worker(1)
    finishes(patient, second)


def test_a_rank_that_an_automatic_node_holds(patient: Cluster) -> None:
    scheduler, _ = patient.formed("a", "b")
    late = patient.worker(1)
    refused(scheduler, late, "rank 1 is taken by worker:b")
    finishes(patient, late)


@pytest.mark.parametrize("complete", [False, True])
def test_the_id_of_a_node_that_lives(patient: Cluster, complete: bool) -> None:
    scheduler = patient.scheduler()
    patient.worker("a")
    if complete:
        patient.worker("b").wait_for("rank=")
    patient.until(lambda v: "a" in nodes_of(v), "the first worker to be registered")
    second = patient.worker("a")
    refused(scheduler, second, "worker:a on", "is alive: a second node with its id is not allowed")
    if not complete:
        patient.worker("b")
    finishes(patient, second)


def test_the_id_of_a_node_that_has_finished(patient: Cluster) -> None:
    scheduler = patient.scheduler()
    patient.worker(0)
    early = patient.worker(1, script=patient.script("import covey; covey.init()"))
    assert early.wait() == 0
    again = patient.worker(1)
    refused(scheduler, again, "worker:1 has finished and left")
    finishes(patient, again)


@pytest.mark.parametrize(("variable", "there", "here"), [("MS_WORKER_NUM", 3, 2), ("MS_SERVER_NUM", 1, 0)])
def test_settings_other_than_the_clusters_are_shown_as_a_difference(
    patient: Cluster, variable: str, there: int, here: int
) -> None:
    scheduler = patient.scheduler()
    other = patient.worker(0, name="other", **{variable: there})
    refused(scheduler, other, f"{variable} is {there} on the node and {here} on the scheduler")
    patient.worker(0)
    patient.worker(1)
    finishes(patient, other)


def test_a_role_this_cluster_has_no_place_for(patient: Cluster) -> None:
    scheduler = patient.scheduler()
    server = patient.node("MS_SERVER", 0, MS_SERVER_NUM=1)
    refused(scheduler, server, "MS_SERVER_NUM is 1 on the node and 0 on the scheduler")


# -- secrets and versions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("secret", "why"), [("wrong", "it is another one"), (None, "")])
def test_without_the_secret_nobody_joins(patient: Cluster, secret: str | None, why: str) -> None:
    scheduler = patient.scheduler(COVEY_SECRET="right")
    stranger = patient.worker(0, name="stranger", COVEY_SECRET=secret)
    assert stranger.wait() == 21, stranger.tail()
    assert "secret" in stranger.text() and "COVEY_SECRET" in stranger.text() and why in stranger.text()
    assert "right" not in stranger.text() + scheduler.text()
    scheduler.wait_for("turned away: .*secret")
    patient.worker(0, COVEY_SECRET="right")
    patient.worker(1, COVEY_SECRET="right")
    finishes(patient, stranger)


def test_a_scheduler_that_does_not_know_the_secret_is_not_joined(patient: Cluster) -> None:
    """A node that has a secret was told to use it: an open door is the wrong door."""
    patient.workers = 1
    patient.scheduler()
    careful = patient.worker(0, COVEY_SECRET="right")
    patient.release()
    assert careful.wait() == 21, careful.tail()
    assert "secret" in careful.text()


def test_beyond_loopback_a_secret_is_asked_for_though_nobody_set_one(patient: Cluster) -> None:
    """The user's own nodes find it in the user's own file; another user's do not."""
    scheduler = patient.scheduler(MS_SCHED_HOST="0.0.0.0")
    scheduler.wait_for("scheduler of cluster")
    foreign = patient.folder / "foreign"
    foreign.mkdir()
    stranger = patient.worker(0, name="stranger", XDG_CONFIG_HOME=str(foreign))
    assert stranger.wait() == 21, stranger.tail()
    assert "secret" in stranger.text()
    patient.worker(0)
    patient.worker(1)
    finishes(patient, stranger)


@pytest.mark.parametrize("version", [PROTOCOL + 1, 0])
def test_a_node_of_another_version_is_told_both_versions(patient: Cluster, version: int) -> None:
    scheduler = patient.scheduler()
    scheduler.wait_for("scheduler of cluster")
    with socket.create_connection((patient.host, patient.port), 60) as node:
        node.sendall(f"covey/{version}\n".encode())
        said = read_to_end(node)
    assert f"covey/{PROTOCOL}" in said and f"no protocol covey/{version} is not spoken here" in said
    scheduler.wait_for(f"turned away: protocol covey/{version} is not spoken here, covey/{PROTOCOL} is")
    patient.worker(0)
    patient.worker(1)
    finishes(patient)


def test_a_scheduler_of_another_version_refuses_at_once_and_by_name(patient: Cluster) -> None:
    with listener(patient.port) as newer:
        newer.settimeout(60)
        node = patient.worker(0)
        call, _ = newer.accept()
        with call:
            call.sendall(b"covey/9 0123456789abcdef0123456789abcdef open\n")
            assert node.wait() == 21, node.tail()
    assert f"the scheduler speaks covey/9, this is covey/{PROTOCOL}" in node.text()


# -- strangers -------------------------------------------------------------------------------------------------------


def read_to_end(sock: socket.socket) -> str:
    """All that the other side says until it closes."""
    data = bytearray()
    try:
        while piece := sock.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data.decode(errors="replace")


STRANGERS = {
    "random bytes": (bytes(range(128, 256)) * 64, "not a covey peer"),
    "HTTP": (b"GET /nodes HTTP/1.1\r\nHost: x\r\n\r\n", "it speaks HTTP"),
    "an endless greeting": (b"covey/" + b"1" * 5000, "no end"),
    "an endless second line": (b"covey/2\n" + b"a" * 5000, "no end"),
    "a greeting of one word": (b"covey/2\nnonce\n", "wrong number of words"),
    "a frame without end": (b"covey/2\n00 -\n\xff\xff\xff\xff", "4294967295 bytes was announced"),
    "a frame of rubbish": (b"covey/2\n00 -\n\x00\x00\x00\x04rubb", "could not be read"),
    "a message of ours it may not say": (b"covey/2\n00 -\n" + encode_frame(Message()), "could not be read"),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_is_turned_away_and_the_cluster_forms_all_the_same(patient: Cluster, kind: str) -> None:
    said, why = STRANGERS[kind]
    scheduler = patient.scheduler()
    scheduler.wait_for("scheduler of cluster")
    with socket.create_connection((patient.host, patient.port), 60) as stranger:
        stranger.sendall(said)
        answer = read_to_end(stranger)
    assert answer.startswith(f"covey/{PROTOCOL} ")
    assert ("HTTP/1.1 400" in answer) == (kind == "HTTP")
    scheduler.wait_for(why)
    patient.worker(0)
    patient.worker(1)
    finishes(patient)
    assert "Traceback" not in scheduler.text()


def test_a_tls_client_on_the_plain_port_is_turned_away_by_name(patient: Cluster) -> None:
    scheduler = patient.scheduler()
    scheduler.wait_for("scheduler of cluster")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((patient.host, patient.port), 60) as plain, pytest.raises((ssl.SSLError, OSError)):
        context.wrap_socket(plain)
    scheduler.wait_for("turned away: it speaks TLS")
    patient.worker(0)
    patient.worker(1)
    finishes(patient)


def test_two_hundred_callers_who_say_nothing_keep_nobody_out(patient: Cluster) -> None:
    scheduler = patient.scheduler()
    scheduler.wait_for("scheduler of cluster")
    idle = [socket.create_connection((patient.host, patient.port), 60) for _ in range(200)]
    patient.worker(0)
    patient.worker(1)
    finishes(patient)
    for sock in idle:
        sock.close()


def test_callers_who_greet_and_say_nothing_more_hold_nobody_up(patient: Cluster) -> None:
    """Nor do they keep the scheduler from ending: its grace is for members."""
    scheduler = patient.scheduler(COVEY_GRACE=1800)
    scheduler.wait_for("scheduler of cluster")
    idle = [greeted(patient) for _ in range(200)]
    patient.worker(0)
    patient.worker(1)
    finishes(patient)
    for sock in idle:
        sock.close()


def greeted(cluster: Cluster) -> socket.socket:
    """A connection whose greeting is over, so that frames may follow."""
    sock = socket.create_connection((cluster.host, cluster.port), 60)
    sock.sendall(b"covey/%d\n00 -\n" % PROTOCOL)
    heard = b""
    while heard.count(b"\n") < 2:
        heard += sock.recv(1)
    assert b"ok - " in heard
    return sock


def test_a_peer_that_registers_twice_over_one_connection_does_not_hold_two_places(patient: Cluster) -> None:
    """When it hangs up, nothing of it may stay behind."""
    scheduler = patient.scheduler()
    scheduler.wait_for("scheduler of cluster")
    with greeted(patient) as peer:
        for node_id in ("0", "1"):
            peer.sendall(encode_frame(Register(Role.WORKER, node_id, f"life {node_id}", ANYWHERE)))
        scheduler.wait_for("refused: its connection already belongs to another node")
    patient.until(lambda v: not nodes_of(v), "both places to be free again")
    patient.worker(0)
    patient.worker(1)
    finishes(patient)


@pytest.mark.parametrize("size", [65_536, 65_537])
def test_a_visitor_cannot_pin_values_to_the_board_of_the_workers(patient: Cluster, size: int) -> None:
    """Only members meet there; and a value above the limit is no message at all."""
    scheduler, _ = patient.formed()
    with greeted(patient) as peer:
        for number in range(100):
            peer.sendall(encode_frame(RendezvousPut(f"key {number}", os.urandom(size), 1)))
            if size > 65_536:
                break
    if size > 65_536:
        scheduler.wait_for("could not be read")
    assert patient.view().phase is Phase.READY
    finishes(patient)


def test_a_register_of_the_schedulers_own_role_is_refused(patient: Cluster) -> None:
    scheduler = patient.scheduler()
    scheduler.wait_for("scheduler of cluster")
    with greeted(patient) as peer:
        peer.sendall(encode_frame(Register(Role.SCHEDULER, "0", "life", ANYWHERE)))
        assert "no members of role scheduler" in read_to_end(peer)
    scheduler.wait_for("refused: this cluster has no members of role scheduler")


def test_names_from_the_wire_cannot_write_lines_of_their_own_into_the_log(patient: Cluster) -> None:
    scheduler = patient.scheduler(GLOG_v=0)
    scheduler.wait_for("scheduler of cluster")
    with greeted(patient) as peer:
        peer.sendall(encode_frame(Register(Role.WORKER, "x\nforged line", "life", ANYWHERE)))
        until(lambda: "forged line" in scheduler.text() or closed(peer), "the name to be logged or refused")
    assert "\nforged line" not in scheduler.text()


def closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(65536) == b""
    except BlockingIOError:
        return False


# -- ports -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["MS_SCHED_PORT", "MS_SCHED_MANAGE_PORT"])
def test_a_port_in_use_names_its_holder(patient: Cluster, variable: str) -> None:
    with listener(0) as taken:
        port = taken.getsockname()[1]
        scheduler = patient.scheduler(**{variable: port})
        assert scheduler.wait() == 11, scheduler.tail()
    assert f"port {port} at 127.0.0.1 is in use by" in scheduler.text()
    assert f"(process {os.getpid()})" in scheduler.text()
    assert len(scheduler.text().splitlines()) == 1


def test_a_rest_port_nobody_asked_for_gives_way(patient: Cluster) -> None:
    """The seeds' default port may be taken by another cluster of the same host."""
    patient.env["MS_SCHED_MANAGE_PORT"] = None
    patient.workers = 1
    try:
        taken: socket.socket | None = listener(11202)
    except OSError:
        taken = None  # somebody else has it, which serves as well
    try:
        scheduler, _ = patient.formed()
        scheduler.wait_for("port 11202 at 127.0.0.1 is in use.*a free one is used")
        scheduler.wait_for(r"REST at http://127.0.0.1:\d+")
        finishes(patient)
    finally:
        if taken is not None:
            taken.close()


def test_the_command_that_asks_is_told_who_refused(patient: Cluster) -> None:
    patient.scheduler(COVEY_SECRET="right").wait_for("scheduler of cluster")
    asked = patient.run(
        [sys.executable, "-m", "covey.cli.main", "check", f"127.0.0.1:{patient.port}"],
        name="check",
        env={"COVEY_SECRET": "wrong", "XDG_RUNTIME_DIR": str(patient.folder)},
    )
    assert asked.code == 21 and "wrong secret" in asked.text(), asked.tail()
