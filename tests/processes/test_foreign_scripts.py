"""MindSpore scripts under plain `covey run`; only the first bytes of MindSpore's protocol are needed."""

from __future__ import annotations

import socket
import sys

import pytest
from tests.processes.command import PATIENT, Shell
from tests.processes.harness import free_port, until

# As MindSpore's init(): connects, sends a message (magic, four lengths, then name, receiver, sender, body), and retries until
# it gets a valid reply. It closes a connection on which it receives bytes before it has sent its own.
JOINS = """
import os, select, socket, struct, time

parts = [b"0", b"MetaServerNode", b"127.0.0.1:1", b"a registration"]
message = b"RPC0" + struct.pack(">4I", *map(len, parts)) + b"".join(parts)


def join():
    where = os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"])
    while True:
        with socket.create_connection(where) as scheduler:
            if not select.select([scheduler], [], [], 0.03)[0]:
                scheduler.sendall(message)
                while scheduler.recv(100):
                    pass
        time.sleep(0.1)


print("rank", os.environ["RANK"], "joins", flush=True)
"""

SENTENCE = "worker:{} runs a MindSpore script, which needs MindSpore's own scheduler: add --framework mindspore"
STAYS = """
import pathlib, sys, time

print("up", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""
MESSAGE = b"RPC0\0\0\0\1\0\0\0\1\0\0\0\1\0\0\0\1abcd"


@pytest.mark.parametrize("child", [False, True], ids=["worker", "child"])
def test_mindspore_script_ends_with_error_naming_the_option(shell: Shell, child: bool) -> None:
    """Also if a child of the worker connects, such as the Python of a shell script."""
    alone = "open(__file__).read().partition('import subp')[0] + 'join()'"
    ends = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {alone}])"
    script = shell.script(JOINS + (ends if child else "join()\n"), "net.py")
    run = shell.covey("run", "-n", "2", script, env=PATIENT)
    assert run.wait() == 10, run.tail()
    assert any(SENTENCE.format(rank) in run.text() for rank in (0, 1)), run.tail()
    shell.assert_no_processes()


def stranger(port: int) -> None:
    """Send MindSpore's first bytes from a process outside the run, until the scheduler closes the connection."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(MESSAGE)
        assert sock.recv(100) == b""


@pytest.mark.parametrize("covey", [False, True], ids=["torchrun's", "covey's"])
def test_mindspore_bytes_of_other_process_end_nothing(shell: Shell, covey: bool) -> None:
    head = "import covey\ncovey.init()\n" if covey else ""
    script = shell.script(head + STAYS)
    shell.port = free_port()
    env = {**PATIENT, "GLOG_v": 0}  # the debug log has a line for each lookup
    run = shell.covey("run", "-n", "2", "--master", f"127.0.0.1:{shell.port}", script, shell.go, env=env)
    shell.wait_for_log(0, "up")
    shell.wait_for_log(1, "up")

    def looked_up() -> bool:
        stranger(shell.port)
        return shell.log("scheduler").count("owner looked up: none of 2 local workers") >= 2

    until(looked_up, "the scheduler to have looked up the owners of two connections", details=lambda: shell.log("scheduler"))
    shell.wait_for_log("scheduler", "turned away: it uses MindSpore's own protocol, not covey's")
    shell.release()
    assert run.wait() == 0, run.tail()


def test_covey_worker_with_mindspore_bytes_does_not_end_the_run(shell: Shell) -> None:
    """The workers of this run have called covey.init(): their other connections must not end it."""
    body = f"socket.create_connection((os.environ['MS_SCHED_HOST'], int(os.environ['MS_SCHED_PORT']))).sendall({MESSAGE!r})"
    script = shell.script(f"import covey, os, socket\ncovey.init()\n{body}\ncovey.barrier()\nprint('done', flush=True)\n")
    run = shell.covey("run", "-n", "2", script)
    assert run.wait() == 0, run.tail()


def test_manual_scheduler_logs_mindspore_protocol(shell: Shell) -> None:
    """No agent started its workers, so the scheduler keeps waiting, and logs the protocol of the connection."""
    scheduler = shell.scheduler()
    shell.listening(shell.port)
    shell.start(
        [sys.executable, "-c", JOINS + "join()"], env={"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": shell.port, "RANK": 0}
    )
    scheduler.wait_for(
        "it uses MindSpore's own protocol, not covey's: start a MindSpore script with covey run --framework mindspore"
    )
    assert scheduler.alive
