"""Refusals: immediate, with the reason at the refused node and in the scheduler's log, while other nodes continue."""

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

# No timeout here expires during a test.
PATIENT = {"MS_TOPO_TIMEOUT": 1800, "MS_NODE_TIMEOUT": 1800, "MS_RECEIVE_MSG_TIMEOUT": 1800}
ANYWHERE = Host("somewhere", "somewhere", "127.0.0.1")


@pytest.fixture
def patient(cluster: Cluster) -> Cluster:
    cluster.env |= PATIENT
    return cluster


def refused(scheduler: Process, node: Process, *arguments: str) -> None:
    """Assert that the node exited with the code of a refusal, and that both sides have the same reason."""
    assert node.wait() == 21, node.tail()
    assert "Traceback" not in node.text()
    assert [line for line in node.text().splitlines() if line.startswith("covey: ")] == node.text().splitlines()[-1:]
    for word in arguments:
        assert word in node.text()
        scheduler.wait_for(word)


def finishes(cluster: Cluster, *refused: Process) -> None:
    """Assert that all other processes succeed."""
    cluster.release()
    codes = cluster.wait()
    assert {name for name, code in codes.items() if code} == {process.name for process in refused}


# -- nodes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node_id", [None, "extra"])
def test_extra_worker_is_refused(patient: Cluster, node_id: str | None) -> None:
    scheduler, _ = patient.formed()
    extra = patient.worker(node_id, name="extra")
    refused(scheduler, extra, r"one worker too many: the cluster already has 2", "worker:0, worker:1")
    finishes(patient, extra)


def test_extra_worker_is_refused_while_servers_are_missing(patient: Cluster) -> None:
    """The cluster is still forming, but has all of its workers."""
    patient.workers = 1
    patient.env["MS_SERVER_NUM"] = 1
    scheduler = patient.scheduler()
    patient.worker("a")
    patient.until(lambda v: nodes_of(v), "the first worker to be registered")
    extra = patient.worker("b")
    refused(scheduler, extra, "one worker too many")
    patient.node("MS_SERVER", 0)
    finishes(patient, extra)


def test_rank_beyond_the_last_is_refused(patient: Cluster) -> None:
    scheduler = patient.scheduler()
    beyond = patient.worker(7)
    refused(scheduler, beyond, "MS_NODE_ID=7 claims rank 7", "end at 1")
    patient.worker(0)
    patient.worker(1)
    finishes(patient, beyond)


def test_rank_claimed_in_two_spellings_is_refused(patient: Cluster) -> None:
    scheduler = patient.scheduler()
    patient.worker("0")
    patient.until(lambda v: nodes_of(v), "the first worker to be registered")
    second = patient.worker("00")
    refused(scheduler, second, "rank 0 is taken by worker:0")
    patient.worker(1)
    finishes(patient, second)


def test_rank_of_an_automatic_node_is_refused(patient: Cluster) -> None:
    scheduler, _ = patient.formed("a", "b")
    late = patient.worker(1)
    refused(scheduler, late, "rank 1 is taken by worker:b")
    finishes(patient, late)


@pytest.mark.parametrize("complete", [False, True])
def test_id_of_a_running_node_is_refused(patient: Cluster, complete: bool) -> None:
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


def test_id_of_a_finished_node_is_refused(patient: Cluster) -> None:
    scheduler = patient.scheduler()
    patient.worker(0)
    early = patient.worker(1, script=patient.script("import covey; covey.init()"))
    assert early.wait() == 0
    again = patient.worker(1)
    refused(scheduler, again, "worker:1 has finished and left")
    finishes(patient, again)


@pytest.mark.parametrize(("variable", "there", "here"), [("MS_WORKER_NUM", 3, 2), ("MS_SERVER_NUM", 1, 0)])
def test_differing_settings_are_refused_with_the_difference(patient: Cluster, variable: str, there: int, here: int) -> None:
    scheduler = patient.scheduler()
    other = patient.worker(0, name="other", **{variable: there})
    refused(scheduler, other, f"{variable} is {there} on the node and {here} on the scheduler")
    patient.worker(0)
    patient.worker(1)
    finishes(patient, other)


def test_role_without_members_in_the_cluster_is_refused(patient: Cluster) -> None:
    scheduler = patient.scheduler()
    server = patient.node("MS_SERVER", 0, MS_SERVER_NUM=1)
    refused(scheduler, server, "MS_SERVER_NUM is 1 on the node and 0 on the scheduler")


# -- secrets and versions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("secret", "reason"), [("wrong", "it differs"), (None, "")])
def test_node_without_secret_is_refused(patient: Cluster, secret: str | None, reason: str) -> None:
    scheduler = patient.scheduler(COVEY_SECRET="right")
    outsider = patient.worker(0, name="stranger", COVEY_SECRET=secret)
    assert outsider.wait() == 21, outsider.tail()
    assert "secret" in outsider.text() and "COVEY_SECRET" in outsider.text() and reason in outsider.text()
    assert "right" not in outsider.text() + scheduler.text()
    scheduler.wait_for("turned away: .*secret")
    patient.worker(0, COVEY_SECRET="right")
    patient.worker(1, COVEY_SECRET="right")
    finishes(patient, outsider)


def test_scheduler_without_the_secret_is_refused(patient: Cluster) -> None:
    """A node with a configured secret must not join a scheduler without one."""
    patient.workers = 1
    patient.scheduler()
    careful = patient.worker(0, COVEY_SECRET="right")
    patient.release()
    assert careful.wait() == 21, careful.tail()
    assert "secret" in careful.text()


def test_secret_is_required_beyond_loopback_even_if_unset(patient: Cluster) -> None:
    """Nodes of the same user read the user's secret file; those of another user cannot."""
    scheduler = patient.scheduler(MS_SCHED_HOST="0.0.0.0")
    scheduler.wait_for("scheduler of cluster")
    foreign = patient.folder / "foreign"
    foreign.mkdir()
    outsider = patient.worker(0, name="stranger", XDG_CONFIG_HOME=str(foreign))
    assert outsider.wait() == 21, outsider.tail()
    assert "secret" in outsider.text()
    patient.worker(0)
    patient.worker(1)
    finishes(patient, outsider)


@pytest.mark.parametrize("version", [PROTOCOL + 1, 0])
def test_node_of_other_version_is_refused_with_both_versions(patient: Cluster, version: int) -> None:
    scheduler = patient.scheduler()
    scheduler.wait_for("scheduler of cluster")
    with socket.create_connection((patient.host, patient.port), 60) as node:
        node.sendall(f"covey/{version}\n".encode())
        output = read_to_end(node)
    assert f"covey/{PROTOCOL}" in output and f"no protocol covey/{version} is not supported" in output
    scheduler.wait_for(f"turned away: protocol covey/{version} is not supported, expected covey/{PROTOCOL}")
    patient.worker(0)
    patient.worker(1)
    finishes(patient)


def test_scheduler_of_other_version_is_refused_immediately(patient: Cluster) -> None:
    with listener(patient.port) as newer:
        newer.settimeout(60)
        node = patient.worker(0)
        call, _ = newer.accept()
        with call:
            call.sendall(b"covey/9 0123456789abcdef0123456789abcdef open\n")
            assert node.wait() == 21, node.tail()
    assert f"the scheduler uses protocol covey/9, this is covey/{PROTOCOL}" in node.text()


# -- invalid peers ---------------------------------------------------------------------------------------------------


def read_to_end(sock: socket.socket) -> str:
    """Return all that the other side sends until it closes."""
    data = bytearray()
    try:
        while piece := sock.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data.decode(errors="replace")


INVALID_PEERS = {
    "random bytes": (bytes(range(128, 256)) * 64, "not a covey peer"),
    "HTTP": (b"GET /nodes HTTP/1.1\r\nHost: x\r\n\r\n", "it uses HTTP"),
    "an endless greeting": (b"covey/" + b"1" * 5000, "line is too long"),
    "an endless second line": (b"covey/2\n" + b"a" * 5000, "line is too long"),
    "a greeting of one word": (b"covey/2\nnonce\n", "wrong number of words"),
    "a frame without end": (b"covey/2\n00 -\n\xff\xff\xff\xff", "4294967295 bytes exceeds the limit"),
    "a frame of rubbish": (b"covey/2\n00 -\n\x00\x00\x00\x04rubb", "invalid message"),
    "a message of ours it may not say": (b"covey/2\n00 -\n" + encode_frame(Message()), "invalid message"),
}


@pytest.mark.parametrize("kind", INVALID_PEERS)
def test_invalid_peer_is_refused_and_cluster_forms(patient: Cluster, kind: str) -> None:
    output, reason = INVALID_PEERS[kind]
    scheduler = patient.scheduler()
    scheduler.wait_for("scheduler of cluster")
    with socket.create_connection((patient.host, patient.port), 60) as outsider:
        outsider.sendall(output)
        answer = read_to_end(outsider)
    assert answer.startswith(f"covey/{PROTOCOL} ")
    assert ("HTTP/1.1 400" in answer) == (kind == "HTTP")
    scheduler.wait_for(reason)
    patient.worker(0)
    patient.worker(1)
    finishes(patient)
    assert "Traceback" not in scheduler.text()


def test_tls_client_on_plain_port_is_refused_by_protocol(patient: Cluster) -> None:
    scheduler = patient.scheduler()
    scheduler.wait_for("scheduler of cluster")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((patient.host, patient.port), 60) as plain, pytest.raises((ssl.SSLError, OSError)):
        context.wrap_socket(plain)
    scheduler.wait_for("turned away: it uses TLS")
    patient.worker(0)
    patient.worker(1)
    finishes(patient)


def test_two_hundred_idle_connections_do_not_keep_nodes_out(patient: Cluster) -> None:
    scheduler = patient.scheduler()
    scheduler.wait_for("scheduler of cluster")
    idle = [socket.create_connection((patient.host, patient.port), 60) for _ in range(200)]
    patient.worker(0)
    patient.worker(1)
    finishes(patient)
    for sock in idle:
        sock.close()


def test_connections_that_never_register_do_not_block_formation(patient: Cluster) -> None:
    """They do not delay the end of the scheduler either: the grace period is for members."""
    scheduler = patient.scheduler(COVEY_GRACE=1800)
    scheduler.wait_for("scheduler of cluster")
    idle = [greeted(patient) for _ in range(200)]
    patient.worker(0)
    patient.worker(1)
    finishes(patient)
    for sock in idle:
        sock.close()


def greeted(cluster: Cluster) -> socket.socket:
    """Open a connection and complete the handshake, so that frames may follow."""
    sock = socket.create_connection((cluster.host, cluster.port), 60)
    sock.sendall(b"covey/%d\n00 -\n" % PROTOCOL)
    received = b""
    while received.count(b"\n") < 2:
        received += sock.recv(1)
    assert b"ok - " in received
    return sock


def test_second_registration_on_a_connection_gets_no_second_rank(patient: Cluster) -> None:
    """After its disconnect nothing of it may remain."""
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
def test_client_cannot_set_rendezvous_values(patient: Cluster, size: int) -> None:
    """Only members use the store; and a value above the limit is an invalid message."""
    scheduler, _ = patient.formed()
    with greeted(patient) as peer:
        for number in range(100):
            peer.sendall(encode_frame(RendezvousPut(f"key {number}", os.urandom(size), 1)))
            if size > 65_536:
                break
    if size > 65_536:
        scheduler.wait_for("invalid message")
    assert patient.view().phase is Phase.READY
    finishes(patient)


def test_registration_with_scheduler_role_is_refused(patient: Cluster) -> None:
    scheduler = patient.scheduler()
    scheduler.wait_for("scheduler of cluster")
    with greeted(patient) as peer:
        peer.sendall(encode_frame(Register(Role.SCHEDULER, "0", "life", ANYWHERE)))
        assert "no members of role scheduler" in read_to_end(peer)
    scheduler.wait_for("refused: this cluster has no members of role scheduler")


def test_node_names_cannot_inject_log_lines(patient: Cluster) -> None:
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
def test_port_in_use_error_names_the_process(patient: Cluster, variable: str) -> None:
    with listener(0) as taken:
        port = taken.getsockname()[1]
        scheduler = patient.scheduler(**{variable: port})
        assert scheduler.wait() == 11, scheduler.tail()
    assert f"port {port} at 127.0.0.1 is in use by" in scheduler.text()
    assert f"(process {os.getpid()})" in scheduler.text()
    assert len(scheduler.text().splitlines()) == 1


def test_default_rest_port_in_use_is_replaced_by_a_free_one(patient: Cluster) -> None:
    """MindSpore's default port may be in use by another cluster of the same host."""
    patient.env["MS_SCHED_MANAGE_PORT"] = None
    patient.workers = 1
    try:
        taken: socket.socket | None = listener(11202)
    except OSError:
        taken = None  # another process has it, which is sufficient
    try:
        scheduler, _ = patient.formed()
        scheduler.wait_for("port 11202 at 127.0.0.1 is in use.*a free port is used")
        scheduler.wait_for(r"REST at http://127.0.0.1:\d+")
        finishes(patient)
    finally:
        if taken is not None:
            taken.close()


def test_command_error_names_the_refusing_scheduler(patient: Cluster) -> None:
    patient.scheduler(COVEY_SECRET="right").wait_for("scheduler of cluster")
    command = patient.run(
        [sys.executable, "-m", "covey.cli.main", "check", f"127.0.0.1:{patient.port}"],
        name="check",
        env={"COVEY_SECRET": "wrong", "XDG_RUNTIME_DIR": str(patient.folder)},
    )
    assert command.code == 21 and "wrong secret" in command.text(), command.tail()
