"""Commands at running clusters: status, nodes, logs, stop, env and check; and the scheduler's REST port."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from tests.processes.command import Shell
from tests.processes.harness import Process, free_port, until
from tests.processes.healing import LADDER
from tests.processes.network import Hosts
from tests.requirements import HOSTS, needs

TALKS = """
import pathlib, sys, time
import covey

covey.init()
rank, go = covey.get_rank(), pathlib.Path(sys.argv[1])
covey.report(10 + rank, "train")
print("hello from", rank, flush=True)
while not go.exists():
    time.sleep(0.02)
    if go.with_name("more").exists() and rank == 1:
        print("more from", rank, flush=True)
        go.with_name("more").unlink()
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with Shell(tmp_path) as shell:
        shell.script(TALKS, "talks.py")
        yield shell


def started(shell: Shell, *words: str, **options: Any) -> Process:
    """Start two workers and wait for their output; `shell.port` is the port of their scheduler."""
    shell.port = free_port()
    run = shell.covey("run", "-n", "2", "--master", f"127.0.0.1:{shell.port}", *words, "talks.py", shell.go, **options)
    shell.wait_for_log(0, "hello")
    shell.wait_for_log(1, "hello")
    return run


def master(shell: Shell) -> str:
    return f"127.0.0.1:{shell.port}"


# -- status, nodes, logs, stop, kill ---------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
def test_status_shows_the_cluster(shell: Shell, named: bool) -> None:
    run = started(shell)
    words = ["--master", master(shell)] if named else []
    until(lambda: [n["step"] for n in shell.nodes()[1:]] == [10, 11], "both to have reported")
    query = shell.run_command("status", *words)
    assert query.code == 0, query.tail()
    assert re.search(r"rank +role +host +state +step +doing +beat +restarts", query.text())
    assert re.search(rf"1 +worker +{socket.gethostname()} +alive +11 +train +\d+\.\d s +0", query.text())
    assert f"scheduler at {master(shell)}" in query.text() and "ready" in query.text()
    view = json.loads(shell.run_command("status", "--json", *words).text())
    assert (view["phase"], view["generation"], view["worker_num"], view["address"]) == ("ready", 1, 2, master(shell))
    assert view["log_dir"] == str(shell.logs) and len(view["nodes"]) == 3
    shell.release()
    assert run.wait() == 0


def test_nodes_lists_all_nodes(shell: Shell) -> None:
    run = started(shell)
    header, *lines = shell.run_command("nodes").text().splitlines()
    assert header.split() == ["node", "rank", "role", "host", "state", "step", "doing", "beat", "restarts", "pid"]
    assert [line.split()[0] for line in lines] == ["scheduler:sched", "worker:0", "worker:1"]
    nodes = shell.nodes()
    assert [(n["role"], n["node_id"], n["rank"], n["alive"]) for n in nodes] == [
        ("scheduler", "sched", 0, True),
        ("worker", "0", 0, True),
        ("worker", "1", 1, True),
    ]
    assert [line.split()[-1] for line in lines] == [str(n["pid"]) for n in nodes]
    assert [n["log"] for n in nodes[1:]] == [str(shell.logs / f"worker_{rank}.log") for rank in (0, 1)]
    shell.release()
    assert run.wait() == 0


def test_logs_prints_the_log_of_a_rank(shell: Shell) -> None:
    run = started(shell)
    assert shell.run_command("logs", "1").text() == "hello from 1\n"
    assert sorted(shell.run_command("logs").text().splitlines()) == ["[0] hello from 0", "[1] hello from 1"]
    absent = shell.run_command("logs", "2")
    assert absent.code == 10 and "rank 2 does not exist: expected 0 to 1" in absent.text()
    follows = shell.covey("logs", "1", "-f")
    follows.wait_for("hello from 1\n")
    (shell.folder / "more").touch()
    follows.wait_for("more from 1\n")
    follows.signal(signal.SIGINT)
    follows.wait()
    assert "Traceback" not in follows.text(), follows.text()
    shell.release()
    assert run.wait() == 0


def test_followed_log_ends_with_the_cluster(shell: Shell) -> None:
    run = started(shell)
    follows = shell.covey("logs", "-f")
    follows.wait_for(r"\[1\] hello from 1\n")
    shell.release()
    assert run.wait() == 0
    assert follows.wait(15) == 0


@pytest.mark.parametrize("words", [["--reason", "the budget is used up"], []])
def test_stop_ends_the_cluster(shell: Shell, words: list[str]) -> None:
    run = started(shell)
    query = shell.run_command("stop", *words)
    assert query.code == 0 and f"stopping the cluster at {master(shell)}" in query.text()
    assert run.wait() == 32, run.tail()
    reason = words[-1] if words else "requested by covey stop"
    assert f"the run ended: {reason}" in run.text()
    assert reason in shell.log(0) and reason in shell.log("scheduler")
    shell.assert_no_processes()


def test_kill_sends_sigkill_to_a_rank(shell: Shell) -> None:
    """A rank, a node and the scheduler are killed, and each is replaced."""
    run = started(shell, env={"COVEY_STRATEGY": LADDER})
    scheduler, _, worker = shell.nodes()
    query = shell.run_command("kill", "1")
    output = f"process {worker['pid']} of worker:1 on {socket.gethostname()} is killed"
    assert (query.code, query.text()) == (0, f"{output}\n")
    shell.wait_for_log(1, "hello", count=2)
    shell.wait_for_log("scheduler", f"worker:1 to be killed: requested by covey kill: {output}")
    assert not psutil.pid_exists(worker["pid"]) and psutil.pid_exists(scheduler["pid"])

    query = shell.run_command("kill", "worker:0", "--json", "--master", master(shell))
    result = json.loads(query.text())
    assert query.code == 0 and result.keys() == {"message", "node"} and result["node"] == "worker:0"
    assert re.fullmatch(rf"process \d+ of worker:0 on {re.escape(socket.gethostname())} is killed", result["message"])
    shell.wait_for_log(0, "hello", count=2)

    query = shell.run_command("kill", "scheduler")
    assert (query.code, query.text()) == (
        0,
        f"process {scheduler['pid']} of scheduler:sched on {socket.gethostname()} is killed\n",
    )
    until(lambda: not psutil.pid_exists(scheduler["pid"]), "the scheduler to be gone")
    until(lambda: shell.run_command("nodes").code == 0, "another scheduler to answer")
    assert shell.nodes()[0]["pid"] != scheduler["pid"]

    for wanted, sentence in (
        ("2", "rank 2 does not exist: expected 0 to 1"),
        ("worker:9", "node 'worker:9' does not exist: covey nodes lists all nodes"),
    ):
        query = shell.run_command("kill", wanted)
        assert (query.code, query.text()) == (10, f"covey: {sentence}\n")
    shell.release()
    assert run.wait() == 0, run.tail()


LEAVES = """
import pathlib, sys, time
import covey

covey.init()
print("hello from", covey.get_rank(), flush=True)
while covey.get_rank() == 0 and not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""


def test_kill_of_exited_rank_is_refused(shell: Shell) -> None:
    shell.script(LEAVES, "talks.py")
    run = started(shell)
    until(lambda: not shell.nodes()[2]["alive"], "rank 1 to have left")
    query = shell.run_command("kill", "1")
    assert query.code == 21
    assert query.text() == f"covey: kill refused by the cluster at {master(shell)}: worker:1 is not running: it is left\n"
    shell.release()
    assert run.wait() == 0


def test_kill_of_manually_started_worker_is_refused(shell: Shell) -> None:
    scheduler, workers = shell.formed()
    pid = workers[1].pid
    query = shell.run_command("kill", "1", "--master", master(shell))
    assert query.code == 21 and workers[1].alive
    assert query.text() == (
        f"covey: cannot kill worker:1: it was not started by covey run; kill process {pid} on {socket.gethostname()}\n"
    )
    assert shell.run_command("kill", "scheduler", "--master", master(shell)).code == 0
    assert scheduler.wait() == 137


@pytest.mark.parametrize("verb", [["status"], ["nodes"], ["logs"], ["stop"], ["kill", "0"]], ids=lambda verb: verb[0])
def test_commands_without_a_cluster_exit_with_reason(shell: Shell, verb: list[str]) -> None:
    query = shell.run_command(*verb)
    assert query.code == 22, query.tail()
    assert query.text().startswith("covey: no running cluster of this user found on this host: give --master")
    assert query.text().count("\n") == 1
    away = shell.run_command(*verb, "--master", master(shell))
    assert away.code == 22 and f"cannot connect to the scheduler at {master(shell)}: no process listens there" in away.text(), (
        away.tail()
    )
    assert away.text().count("\n") == 1
    bad = shell.run_command(*verb, "--master", "127.0.0.1")
    assert bad.code == 10 and "has no port: give HOST:PORT" in bad.text()


def test_several_clusters_are_listed(shell: Shell) -> None:
    ports = []
    for name in ("one", "two"):
        shell.logs = shell.folder / name
        started(shell)
        ports.append(shell.port)
    for verb in (["nodes"], ["logs"], ["stop"], ["kill", "0"]):
        query = shell.run_command(*verb)
        assert query.code == 10, query.tail()
        assert "several clusters of this user run on this host, choose one:" in query.text()
        assert re.findall(r"--master 127\.0\.0\.1:(\d+) +(\S+)", query.text()) == [(str(p), "talks.py") for p in ports]
    text = shell.run_command("status").text()
    assert all(f"scheduler at 127.0.0.1:{port}" in text for port in ports)
    views = [json.loads(line) for line in shell.run_command("status", "--json").text().splitlines()]
    assert [view["address"] for view in views] == [f"127.0.0.1:{port}" for port in ports]
    assert shell.run_command("stop", "--master", f"127.0.0.1:{ports[0]}").code == 0
    until(lambda: not shell.all[0].alive, "the first to end")
    assert [node["role"] for node in shell.nodes()] == ["scheduler", "worker", "worker"]
    shell.release()
    shell.assert_no_processes()


def test_killed_cluster_is_not_listed(shell: Shell) -> None:
    run = started(shell)
    run.kill()
    shell.assert_no_processes()
    assert shell.run_command("status").code == 22
    assert list((shell.folder / "runtime" / "covey").glob("*.json")) == []


# -- env -------------------------------------------------------------------------------------------------------------


def test_env_shows_values_and_origins(shell: Shell) -> None:
    env = {"MS_NODE_TIMEOUT": "7.5", "COVEY_SECRET": "not for the eyes", "MS_SCHED_HOST": "::1"}
    rows = {row["name"]: row for row in json.loads(shell.run_command("env", "--json", env=env).text())}
    assert (rows["MS_NODE_TIMEOUT"]["value"], rows["MS_NODE_TIMEOUT"]["origin"]) == ("7.5", "MS_NODE_TIMEOUT")
    assert (rows["MS_TOPO_TIMEOUT"]["value"], rows["MS_TOPO_TIMEOUT"]["origin"]) == ("1800", "default")
    assert rows["COVEY_SECRET"]["value"] == "(set)" and all(row["what"] for row in rows.values())
    plain = shell.run_command("env", env=env)
    assert re.search(r"^MS_NODE_TIMEOUT +7\.5 +MS_NODE_TIMEOUT +\S", plain.text(), re.MULTILINE)
    assert re.search(r"^MS_TOPO_TIMEOUT +1800 +default +\S", plain.text(), re.MULTILINE)
    assert "not for the eyes" not in plain.text()
    bad = shell.run_command("env", env={"MS_NODE_TIMEOUT": "soon"})
    assert bad.code == 10 and bad.text().startswith("covey: MS_NODE_TIMEOUT=soon is invalid")


# -- check -----------------------------------------------------------------------------------------------------------


def test_check_of_unused_port_fails(shell: Shell) -> None:
    query = shell.run_command("check", master(shell))
    assert query.code == 22 and query.text() == f"{master(shell)} is not reachable: Connection refused\n"
    unknown = shell.run_command("check", "no-such-host.invalid:8118")
    assert unknown.code == 22 and "no-such-host.invalid:8118 is not reachable" in unknown.text()
    assert shell.run_command("check", "127.0.0.1").code == 10
    assert shell.run_command("check", "127.0.0.1:port").code == 10


def test_check_of_other_program_fails(shell: Shell) -> None:
    shell.start([sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(shell.port)], name="http")
    shell.listening(shell.port)
    query = shell.run_command("check", master(shell))
    assert query.code == 21, query.tail()
    assert f"{master(shell)} is reachable\n" in query.text() and "covey" in query.text().splitlines()[1]
    assert "Traceback" not in query.text()


def test_check_of_running_cluster_succeeds(shell: Shell) -> None:
    """The user's own cluster needs no secret, as with every other command."""
    run = started(shell)
    for env in ({}, {"MS_SCHED_HOST": "127.0.0.1"}):
        query = shell.run_command("check", master(shell), env=env)
        assert query.code == 0, query.tail()
        assert re.search(r"reachable\na covey scheduler replies.*\nthe clocks agree \(offset [+-]\d+ ms\)\n$", query.text())
    shell.release()
    assert run.wait() == 0


def test_check_with_and_without_the_secret(shell: Shell) -> None:
    run = started(shell, env={"COVEY_SECRET": "right"})
    elsewhere = {"XDG_RUNTIME_DIR": str(shell.folder / "home")}  # as another user, or on another host
    good = shell.run_command("check", master(shell), env={**elsewhere, "COVEY_SECRET": "right"})
    assert good.code == 0 and "a covey scheduler replies and accepts the secret" in good.text(), good.tail()
    wrong = shell.run_command("check", master(shell), env={**elsewhere, "COVEY_SECRET": "wrong"})
    assert wrong.code == 21 and "wrong secret" in wrong.text() and "COVEY_SECRET" in wrong.text(), wrong.tail()
    none = shell.run_command("check", master(shell), env=elsewhere)
    assert none.code == 21 and "wrong secret (none was sent)" in none.text(), none.tail()
    shell.wait_for_log("scheduler", r"connection from 127\.0\.0\.1 turned away: wrong secret")
    shell.release()
    assert run.wait() == 0


def test_check_of_tls_cluster_needs_tls_settings(shell: Shell) -> None:
    made = shell.run_command("tls", "init", shell.folder / "tls", "--password", "pw")
    assert made.code == 0, made.tail()
    passwords = {"COVEY_TLS_SERVER_PASSWORD": "pw", "COVEY_TLS_CLIENT_PASSWORD": "pw"}
    config = shell.folder / "tls" / "config.json"
    run = started(shell, "--tls", str(config), env=passwords)
    elsewhere = {"XDG_RUNTIME_DIR": str(shell.folder / "home")}
    plain = shell.run_command("check", master(shell), env=elsewhere)
    assert plain.code == 21 and "the scheduler requires TLS: set COVEY_TLS" in plain.text(), plain.tail()
    secret = json.loads(next((shell.folder / "runtime" / "covey").glob("*.json")).read_text())["secret"]
    good = shell.run_command(
        "check", master(shell), env={**elsewhere, **passwords, "COVEY_TLS": str(config), "COVEY_SECRET": secret}
    )
    assert good.code == 0 and "the clocks agree" in good.text(), good.tail()
    # The other commands find the TLS settings; they need only the password.
    assert shell.run_command("status", env=passwords).code == 0
    wrong = shell.run_command("status", env={**passwords, "COVEY_TLS_CLIENT_PASSWORD": "another"})
    assert wrong.code == 12 and "the client password is wrong" in wrong.text(), wrong.tail()
    assert shell.run_command("stop", env=passwords).code == 0
    assert run.wait() == 32


# -- REST port -------------------------------------------------------------------------------------------------------


def rest(run: Process) -> str:
    found = re.search(r"REST at (http://127\.0\.0\.1:\d+)", run.text())
    assert found, run.text()
    return found[1]


def entry(shell: Shell) -> dict[str, Any]:
    """Return the registry entry of the scheduler."""
    path = next((shell.folder / "runtime" / "covey").glob("*.json"))
    assert path.stat().st_mode & 0o077 == 0, "it contains the token and the secret"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_mindspore_rest_requests_are_answered(shell: Shell) -> None:
    run = started(shell)
    with httpx2.Client(base_url=rest(run), trust_env=False) as client:
        until(lambda: _answers(client), "the REST port to answer")
        nodes = client.get("/nodes").json()
        assert nodes["message"] == "Get nodes info successful." and nodes["code"] == "0"
        assert sorted(nodes["nodeIds"], key=lambda node: (node["role"], node["nodeId"])) == [
            {"nodeId": "sched", "rankId": "0", "role": "SCHEDULER", "alive": "true"},
            {"nodeId": "0", "rankId": "0", "role": "WORKER", "alive": "true"},
            {"nodeId": "1", "rankId": "1", "role": "WORKER", "alive": "true"},
        ]
        state = client.get("/state").json()
        assert (state["cluster_state"], state["code"]) == ("CLUSTER_READY", "0")
        wrong = client.post("/nodes", json={})
        assert wrong.status_code == 405 and wrong.json()["code"] == "1" and "GET" in wrong.json()["error_message"]
        bad = client.post("/stop", content=b"{no json")
        assert bad.status_code == 400 and bad.json()["code"] == "1" and bad.json()["error_message"]
        assert client.get("/healthz").status_code == 200
        assert "/nodes" in client.get("/openapi.json").json()["paths"]
        assert re.search(r"^covey_\w+(\{.*\})? \d", client.get("/metrics").text, re.MULTILINE)
        stopped = client.post("/stop", json={"reason": "by REST"})
        assert stopped.status_code == 200 and stopped.json()["code"] == "0"
    assert run.wait() == 32, run.tail()
    assert "by REST" in run.text()


def _answers(client: httpx2.Client) -> bool:
    try:
        return client.get("/healthz").status_code == 200
    except httpx2.HTTPError:
        return False


def test_rest_access_on_loopback_needs_token_for_changes(shell: Shell) -> None:
    """A command is accepted; a web page only with the token."""
    run = started(shell)
    bearer = {"Authorization": f"Bearer {entry(shell)['token']}"}
    with httpx2.Client(base_url=rest(run), trust_env=False) as client:
        until(lambda: _answers(client), "the REST port to answer")
        for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.example"}):
            refused = client.get("/nodes", headers=headers)
            assert refused.status_code in (401, 403) and refused.json()["code"] == "1", headers
            assert client.post("/stop", headers=headers).status_code in (401, 403)
            assert client.get("/nodes", headers={**headers, **bearer}).status_code == 200
        assert client.get("/nodes", headers={"Authorization": "Bearer guess"}).status_code == 401
        assert client.get("/state").json()["cluster_state"] == "CLUSTER_READY"
    shell.release()
    assert run.wait() == 0


def test_rest_and_cluster_port_answer_plain_http(shell: Shell) -> None:
    """As with telnet: the REST port speaks HTTP/1.1, and the cluster port replies that it does not."""
    run = started(shell)
    port = int(rest(run).rpartition(":")[2])
    with httpx2.Client(base_url=rest(run), trust_env=False) as client:
        until(lambda: _answers(client), "the REST port to answer")
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"GET /state HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        reply = b"".join(iter(lambda: sock.recv(4096), b""))
    assert reply.startswith(b"HTTP/1.1 200 ") and b"CLUSTER_READY" in reply
    with socket.create_connection(("127.0.0.1", shell.port)) as sock:
        sock.sendall(b"GET /state HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        reply = b"".join(iter(lambda: sock.recv(4096), b""))
    assert b"400" in reply and b"not its REST port" in reply
    shell.wait_for_log("scheduler", "turned away: it uses HTTP")
    shell.release()
    assert run.wait() == 0


def test_rest_port_can_be_chosen_or_disabled(shell: Shell) -> None:
    chosen = free_port()
    run = started(shell, "--manage-port", str(chosen))
    assert rest(run) == f"http://127.0.0.1:{chosen}"
    shell.run_command("stop")
    assert run.wait() == 32
    shell.logs = shell.folder / "other"
    run = started(shell, "--manage-port", "0")
    assert "REST" not in run.text() and entry(shell)["manage"] == ""
    assert json.loads(shell.run_command("status", "--json").text())["manage_port"] == 0
    shell.release()
    assert run.wait() == 0


ASK = "import httpx2, sys\nprint(httpx2.get(sys.argv[1], headers=eval(sys.argv[2]), trust_env=False).status_code)"


@needs(*HOSTS)
def test_rest_beyond_loopback_requires_token(shell: Shell) -> None:
    with Hosts(f"cov{uuid.uuid4().hex[:6]}") as hosts:
        env = {"COVEY_SECRET": "s", "COVEY_TOKEN": "the-token"}
        manage = free_port()
        words = ["-n", "1", "--master", f"{hosts.addresses[0]}:{shell.port}", "--manage-port", str(manage)]
        run = shell.covey("run", *words, "talks.py", shell.go, before=hosts.on(0), env=env)
        shell.wait_for_log(0, "hello")

        def status(host: int, address: str, headers: str = "{}") -> str:
            query = shell.run([*hosts.on(host), sys.executable, "-c", ASK, f"http://{address}:{manage}/nodes", headers])
            return query.text().strip().splitlines()[-1]

        until(lambda: status(0, "127.0.0.1") == "200", "the REST port to answer")
        assert status(1, hosts.addresses[0]) == "401"
        assert status(1, hosts.addresses[0], "{'Authorization': 'Bearer the-token'}") == "200"
        assert status(1, hosts.addresses[0], "{'Authorization': 'Bearer a-guess'}") == "401"
        assert status(0, hosts.addresses[0]) == "401"
        shell.release()
        assert run.wait() == 0, run.tail()
