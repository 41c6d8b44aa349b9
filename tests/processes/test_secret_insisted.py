"""A process with a join secret refuses a scheduler that does not require it: every role and command, every source of a
secret."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from tests.processes.command import Shell
from tests.processes.fakes import fake_scheduler
from tests.processes.harness import Process, free_port
from tests.processes.network import Hosts
from tests.requirements import HOSTS, needs

SECRET = "mellon"
PATIENT: dict[str, str] = {"MS_TOPO_TIMEOUT": "1800", "MS_NODE_TIMEOUT": "1800"}  # no timeout may explain the end of a process
SERVER = """
import numpy as np
import covey.federated

covey.set_fl_context(
    enable_fl=True, ms_role="MS_SERVER", scheduler_ip="127.0.0.1", scheduler_port=PORT, fl_server_port=OWN, server_num=1,
)
covey.federated.run({"w": np.zeros(4, np.float32)})
"""
# Completes the handshake like a scheduler that requires no secret, and prints all received bytes.
OPEN = """
import socket, sys

with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("listening", flush=True)
    while True:
        caller, _ = server.accept()
        caller.sendall(b"covey/2 0123456789abcdef0123456789abcdef open\\n")
        heard = b""
        while piece := caller.recv(4096):
            heard += piece
        print("heard", heard, flush=True)
"""


def variable(shell: Shell) -> dict[str, str]:
    return {"COVEY_SECRET": SECRET}


def file(shell: Shell) -> dict[str, str]:
    path = shell.folder / "the-secret"
    path.touch(mode=0o600)
    path.write_text(SECRET + "\n")
    return {"COVEY_SECRET_FILE": str(path)}


def settings_file(shell: Shell) -> dict[str, str]:
    path = shell.folder / "settings.json"
    path.write_text(json.dumps({"COVEY_SECRET": SECRET}))
    return {"COVEY_SETTINGS": str(path)}


Source = Callable[[Shell], dict[str, str]]


def raw(role: str) -> Callable[[Shell, dict[str, str]], Process]:
    def start(shell: Shell, env: dict[str, str]) -> Process:
        variables: dict[str, Any] = {"MS_SERVER_NUM": 0 if role == "MS_WORKER" else 1, **env, **PATIENT}
        return shell.node(role, 0, **variables)

    return start


def run(*arguments: str) -> Callable[[Shell, dict[str, str]], Process]:
    def start(shell: Shell, env: dict[str, str]) -> Process:
        master = f"127.0.0.1:{shell.port}"
        env = {"COVEY_STRATEGY": "recover,exit"} | env | PATIENT
        return shell.covey("run", "-n", "2", *arguments, "--master", master, shell.default, env=env)

    return start


def federated_server(shell: Shell, env: dict[str, str]) -> Process:
    script = shell.script(SERVER.replace("PORT", str(shell.port)).replace("OWN", str(free_port())), "server.py")
    return shell.start([sys.executable, script], env=env | PATIENT)


def verb(*arguments: str) -> Callable[[Shell, dict[str, str]], Process]:
    return lambda shell, env: shell.covey(*(word.format(port=shell.port) for word in arguments), env=env)


MASTER = ("--master", "127.0.0.1:{port}")
CALLERS: dict[str, Callable[[Shell, dict[str, str]], Process]] = {
    "worker": raw("MS_WORKER"),
    "parameter server": raw("MS_PSERVER"),
    "server": raw("MS_SERVER"),
    "agent": run("--local", "1"),
    "agent of spares": run("--local", "0", "--spares", "1"),
    "federated server": federated_server,
    "status": verb("status", *MASTER),
    "nodes": verb("nodes", *MASTER),
    "logs": verb("logs", *MASTER),
    "events": verb("events", *MASTER),
    "story": verb("story", "0", *MASTER),
    "top": verb("top", *MASTER),
    "scale": verb("scale", "--workers", "3", *MASTER),
    "stop": verb("stop", *MASTER),
    "kill": verb("kill", "0", *MASTER),
    "chaos": verb("chaos", *MASTER, "--times", "1"),
    "check": verb("check", "127.0.0.1:{port}"),
}


CASES = [(caller, source) for source in (variable, file) for caller in CALLERS]
CASES += [(caller, settings_file) for caller in ("worker", "agent", "federated server", "status")]


@pytest.mark.parametrize(("caller", "source"), CASES)
def test_scheduler_without_secret_is_refused_if_one_is_configured(shell: Shell, caller: str, source: Source) -> None:
    with fake_scheduler(shell.port) as fake:
        process = CALLERS[caller](shell, source(shell))
        assert process.wait() == 21, process.tail()
        assert not fake.messages and not fake.connection_count()
    text = process.text()
    assert f"the scheduler at 127.0.0.1:{shell.port} does not require a join secret, but this process has one: " in text
    assert "COVEY_SECRET_FILE" in text and "Traceback" not in text and SECRET not in text


@pytest.mark.parametrize("source", [variable, file])
def test_bundle_contains_the_refusal_of_the_scheduler(shell: Shell, source: Source) -> None:
    with fake_scheduler(shell.port) as fake:
        bundle = shell.run_command("bundle", "--master", f"127.0.0.1:{shell.port}", env=source(shell))
        assert not fake.messages and not fake.connection_count()
    assert "does not require a join secret" in bundle.text(), bundle.tail()


# -- the scheduler's side, and the automatic secret --------------------------------------------------------------------------


@pytest.mark.parametrize("source", [variable, file, settings_file])
def test_scheduler_on_loopback_requires_the_configured_secret(shell: Shell, source: Source) -> None:
    shell.workers = 1
    shell.scheduler(**source(shell)).wait_for("scheduler of cluster")
    outsider = shell.worker(0, name="stranger", **PATIENT)
    assert outsider.wait() == 21 and "wrong secret (none was sent)" in outsider.text(), outsider.tail()
    worker = shell.worker(0, **source(shell), **PATIENT)
    shell.release()
    assert worker.wait() == 0, worker.tail()


@pytest.mark.parametrize("source", [variable, file, settings_file])
def test_run_on_loopback_forms_with_a_configured_secret(shell: Shell, source: Source) -> None:
    shell.release()
    run = shell.run_command("run", "-n", "2", shell.default, shell.go, env=source(shell))
    assert run.code == 0 and "all 2 workers finished" in run.text(), run.tail()


def test_automatic_secret_joins_an_open_scheduler_on_loopback(shell: Shell) -> None:
    """The user's secret file may exist because of another cluster, which listens beyond loopback."""
    user_secret(shell)
    shell.workers = 1
    shell.scheduler().wait_for("scheduler of cluster")
    arguments = ["-n", "1", "--master", f"127.0.0.1:{shell.port}"]
    agent = shell.covey("run", *arguments, shell.default, shell.go, env={"MS_ROLE": "MS_WORKER"})
    shell.wait_for_log(0, "rank=0 world=1")
    status = shell.run_command("status")
    assert status.code == 0 and "SECRET" not in shell.log(0), status.tail()
    shell.release()
    assert agent.wait() == 0, agent.tail()


@needs(*HOSTS)
def test_automatic_secret_is_required_beyond_loopback(shell: Shell) -> None:
    """A covey scheduler that listens beyond loopback always requires a secret: one that does not is another program."""
    user_secret(shell)
    with Hosts(f"cov{uuid.uuid4().hex[:6]}") as hosts:
        master = f"{hosts.addresses[0]}:{shell.port}"
        script = shell.script(OPEN, "open.py")
        fake = shell.start([*hosts.on(0), sys.executable, script, hosts.addresses[0], str(shell.port)], name="fake")
        fake.wait_for("listening")
        status = shell.run_command("status", "--master", master, before=hosts.on(1))
        assert status.code == 21 and f"the scheduler at {master} does not require a join secret" in status.text(), status.tail()
        run = shell.run_command(
            "run", "-n", "2", "--local", "1", "--master", master, shell.default, before=hosts.on(1), env=PATIENT
        )
        assert run.code == 21 and f"the scheduler at {master} does not require a join secret" in run.text(), run.tail()
        fake.wait_for("heard b'covey/[0-9]+.n'\n.*heard b'covey/[0-9]+.n'")


def user_secret(shell: Shell) -> None:
    path = shell.folder / "config" / "covey" / "secret"
    path.parent.mkdir()
    path.touch(mode=0o600)
    path.write_text("made on first use\n")
