"""Scripts of MindSpore's under plain `covey run`: MindSpore itself is not needed, its first bytes are."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.command import PATIENT, Shell, shells
from tests.processes.harness import free_port, until

# As MindSpore's init(): it connects, sends a message (magic, four lengths, then name, receiver, sender, body), and tries again
# until it is answered in kind. It closes a connection over which anything else comes before it has spoken.
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


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    yield from shells(tmp_path)


@pytest.mark.parametrize("child", [False, True], ids=["worker", "child"])
def test_a_mindspore_script_ends_with_a_sentence_that_names_the_option(shell: Shell, child: bool) -> None:
    """Also if a child of the worker connects, such as a shell script's Python."""
    alone = "open(__file__).read().partition('import subp')[0] + 'join()'"
    ends = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {alone}])"
    script = shell.script(JOINS + (ends if child else "join()\n"), "net.py")
    run = shell.covey("run", "-n", "2", script, env=PATIENT)
    assert run.wait() == 10, run.tail()
    assert any(SENTENCE.format(rank) in run.text() for rank in (0, 1)), run.tail()
    shell.nobody()


def stranger(port: int) -> None:
    """Send MindSpore's first bytes from a process that is none of the run's, until the scheduler closes the connection."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(MESSAGE)
        assert sock.recv(100) == b""


@pytest.mark.parametrize("covey", [False, True], ids=["torchrun's", "covey's"])
def test_a_stranger_with_mindspores_bytes_ends_nothing(shell: Shell, covey: bool) -> None:
    head = "import covey\ncovey.init()\n" if covey else ""
    script = shell.script(head + STAYS)
    shell.port = free_port()
    env = {**PATIENT, "GLOG_v": 0}  # the debug log has a line for each lookup
    run = shell.covey("run", "-n", "2", "--master", f"127.0.0.1:{shell.port}", script, shell.go, env=env)
    shell.heard(0, "up")
    shell.heard(1, "up")

    def looked_up() -> bool:
        stranger(shell.port)
        return shell.log("scheduler").count("owner looked up: none of 2 local workers") >= 2

    until(looked_up, "the scheduler to have looked up the owners of two connections", story=lambda: shell.log("scheduler"))
    shell.heard("scheduler", "turned away: it uses MindSpore's own protocol, not covey's")
    shell.release()
    assert run.wait() == 0, run.tail()


def test_a_worker_of_covey_may_speak_to_it_as_mindspore_does(shell: Shell) -> None:
    """A run whose workers have called covey.init() trains here: nothing that they connect to ends it."""
    body = f"socket.create_connection((os.environ['MS_SCHED_HOST'], int(os.environ['MS_SCHED_PORT']))).sendall({MESSAGE!r})"
    script = shell.script(f"import covey, os, socket\ncovey.init()\n{body}\ncovey.barrier()\nprint('done', flush=True)\n")
    run = shell.covey("run", "-n", "2", script)
    assert run.wait() == 0, run.tail()


def test_a_scheduler_started_by_hand_says_what_speaks_to_it(shell: Shell) -> None:
    """Its workers are none of an agent's, so it waits for its own; its terminal says what came instead."""
    scheduler = shell.scheduler()
    shell.listening(shell.port)
    shell.start(
        [sys.executable, "-c", JOINS + "join()"], env={"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": shell.port, "RANK": 0}
    )
    scheduler.wait_for(
        "it uses MindSpore's own protocol, not covey's: start a MindSpore script with covey run --framework mindspore"
    )
    assert scheduler.alive
