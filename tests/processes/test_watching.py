"""Observing a run: the live table, top, events, story, and the bundle for a bug report."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.command import Shell, Terminal
from tests.processes.harness import until

# Waits in every step until it is released; a replacement attaches again.
STEPS = """
import pathlib, sys, time
import numpy, covey

covey.init()
rank, go = covey.get_rank(), pathlib.Path(sys.argv[1])
print("up", rank, flush=True)
while True:
    over = covey.all_reduce(numpy.array([float(go.exists())]))
    if float(over[0]) > 0:
        break
    time.sleep(0.02)
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with Shell(tmp_path) as shell:
        shell.script(STEPS, "steps.py")
        yield shell


def events(shell: Shell, *arguments: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in shell.run_command(*arguments, "--json").text().splitlines()]


def test_death_is_shown_by_every_command(shell: Shell) -> None:
    """Start a run with a terminal and kill its worker 1."""
    secret = "secret-that-no-log-shows"
    env = {"COVEY_STRATEGY": "recover-in-place,exit", "COVEY_SECRET": secret, "TERM": "xterm-256color", "NO_COLOR": "1"}
    terminal, table = Terminal(), Terminal()
    shell.covey("run", "-n", "2", "steps.py", shell.go, env=env, stdout=terminal.theirs)
    shell.wait_for_log(1, "up 1")
    follows = shell.covey("events", "-f", name="events")
    top = shell.covey("top", name="top", env=env, stdout=table.theirs)
    plain = shell.covey("top", name="plain")
    until(lambda: "ready" in plain.text() and "formed" in follows.text(), "both to follow", details=shell.tails)
    os.kill(next(node["pid"] for node in shell.nodes() if node["rank"] == 1), 9)
    follows.wait_for("worker:1 died: killed by SIGKILL")
    follows.wait_for("cluster recovery: recover-in-place of worker:1")
    for shown in (terminal, table):
        text = shown.wait_for(r"recover-in-place of worker:1 \(killed by SIGKILL\)")
        assert re.search(r"rank +role +host +state", text)
        assert "\x1b[3" not in text, "NO_COLOR is set"
    plain.wait_for("covey: recover-in-place of worker:1")

    result = events(shell, "story", "1")
    assert [event["what"] for event in result][:2] == ["died", "recover-in-place"]
    assert result == [event for event in events(shell, "events") if event["at"] in {one["at"] for one in result}]
    unknown = shell.run_command("story", "7")
    assert unknown.code == 10 and "no node 7: there are events of agent:" in unknown.text()

    (shell.logs / "worker_0.log").open("a").write(f"the secret is {secret}, Authorization: Bearer abcdefgh12345\n")
    made = shell.run_command("bundle", "--output", shell.folder / "b.tar.gz", "--json", env=env)
    assert made.code == 0 and json.loads(made.text())["left_out"] == [], made.text()
    with tarfile.open(shell.folder / "b.tar.gz") as archive:
        files = {name.removeprefix("covey-bundle/"): archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]
    assert {"versions.json", "settings.json", "cluster.json", "story.jsonl", "scheduler.journal"} <= set(files)
    assert {"logs/scheduler.log", "logs/worker_0.log", "logs/worker_1.log"} <= set(files)
    assert b"the secret is ****" in files["logs/worker_0.log"] and b"Bearer ****" in files["logs/worker_0.log"]
    assert not [name for name, content in files.items() if secret.encode() in content or b"abcdefgh12345" in content]

    shell.release()
    assert shell.all[0].wait() == 0
    assert (follows.wait(), top.wait(), plain.wait()) == (0, 0, 0)
    assert "cluster ended: all 2 workers finished" in follows.text()
    terminal.close()
    table.close()


def test_bundle_needs_no_running_cluster(shell: Shell) -> None:
    shell.logs.mkdir()
    (shell.logs / "worker_0.log").write_text("x" * (2 << 20) + "the end")
    made = shell.run_command("bundle", "--log-dir", shell.logs, "--output", shell.folder / "b.tar.gz")
    assert made.code == 0, made.text()
    with tarfile.open(shell.folder / "b.tar.gz") as archive:
        log = archive.extractfile("covey-bundle/logs/worker_0.log")
        assert log is not None
        content = log.read()
    assert len(content) == 1 << 20 and content.endswith(b"the end")
    assert shell.run_command("bundle", "--output", shell.folder / "c.tar.gz").code == 22
    bad = shell.run_command("bundle", "--log-dir", shell.logs, "--output", shell.folder / "no" / "b.tar.gz")
    assert bad.code == 41 and bad.text().count("\n") == 1 and "choose another --output" in bad.text()


def test_json_run_prints_one_object_per_line(shell: Shell) -> None:
    shell.release()
    run = shell.run_command("run", "-n", "1", "--json", "steps.py", shell.go)
    lines = [json.loads(line) for line in run.text().splitlines() if line.startswith("{")]  # without log lines
    assert run.code == 0 and {"rank": 0, "line": "up 0"} in lines
    assert lines[0]["log_dir"] == str(shell.logs) and lines[0]["message"].startswith("scheduler at ")
    assert lines[-1] == {"message": "the only worker finished", "code": 0}, lines[-1]
