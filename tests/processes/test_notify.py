"""`covey run --on-event`: the events that a command or a URL receives, which never block the run."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.processes.command import Shell
from tests.processes.harness import until
from tests.processes.test_watching import STEPS

SECRET = "secret-that-no-log-shows"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with Shell(tmp_path) as shell:
        shell.script(STEPS, "steps.py")
        yield shell


def test_on_event_command_receives_death_recovery_and_exit(shell: Shell) -> None:
    shell.script("import sys\nopen(sys.argv[1], 'a').write(sys.stdin.read())\n", "hook.py")
    result = shell.folder / "told"
    env = {"COVEY_STRATEGY": "recover-in-place,exit", "COVEY_SECRET": SECRET}
    run = shell.covey("run", "-n", "2", "--on-event", f"python hook.py '{result}'", "steps.py", shell.go, env=env)
    shell.wait_for_log(1, "up 1")
    os.kill(next(node["pid"] for node in shell.nodes() if node["rank"] == 1), 9)
    until(
        lambda: result.exists() and '"recovery"' in result.read_text(), "the hook to hear of the recovery", details=shell.tails
    )
    shell.release()
    assert run.wait() == 0, run.tail()
    notices = [json.loads(line) for line in result.read_text().splitlines()]
    assert [(n["event"], n["node"], n["code"]) for n in notices] == [
        ("death", "worker:1", None),
        ("recovery", "cluster", None),
        ("exit", "cluster", 0),
    ]
    assert notices[0]["reason"] == "killed by SIGKILL" and notices[2]["reason"] == "all 2 workers finished"
    assert notices[1]["reason"].startswith("recover-in-place of worker:1 (killed by SIGKILL): detected")
    assert {(n["job"], n["dropped"], n["schema"]) for n in notices} == {(f"steps.py {shell.go}", 0, 1)}
    assert SECRET not in result.read_text()


def test_on_event_url_receives_the_exit(shell: Shell) -> None:
    received: list[dict[str, object]] = []

    class Hears(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hears) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shell.release()
        url = f"http://127.0.0.1:{server.server_address[1]}/hook"
        run = shell.run_command("run", "-n", "1", "--on-event", url, "steps.py", shell.go)
        server.shutdown()
    assert run.code == 0, run.tail()
    assert [(notice["event"], notice["code"]) for notice in received] == [("exit", 0)]


def test_failing_hook_is_logged_once_and_run_continues(shell: Shell) -> None:
    shell.release()
    run = shell.run_command("run", "-n", "1", "--on-event", "false", "steps.py", shell.go)
    assert run.code == 0, run.tail()
    assert run.text().count("--on-event failed: false exited with code 1; the run continues") == 1
    bad = shell.run_command("run", "--on-event", "no-such-program x", "steps.py")
    assert bad.code == 10 and bad.text().startswith(
        "covey: --on-event no-such-program x is invalid: expected an existing command"
    )
