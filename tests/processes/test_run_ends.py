"""How a run of `covey run` ends: the first failure, signals, kill -9 of any process of it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.processes.command import Shell, shells
from tests.processes.harness import until

# The seeds' heartbeat limit, far beyond a test's patience: whoever ends within it was told, or saw it happen.
PATIENT = {"MS_NODE_TIMEOUT": 600, "COVEY_GRACE": 600}

# Rank 1 waits for the file and then does what the second argument says; the others never end by themselves.
FAILS = """
import os, pathlib, signal, sys, time

if "covey" in sys.argv:
    import covey
    covey.init()
rank = int(os.environ["RANK"])
print(f"rank={rank}", flush=True)

def fail():
    if sys.argv[2] == "raise":
        raise ValueError("the loss is not a number")
    exec(sys.argv[2])

while not (rank == 1 and pathlib.Path(sys.argv[1]).exists()):
    time.sleep(0.02)
fail()
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    yield from shells(tmp_path)


# -- the first failure -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["covey", "plain"])
@pytest.mark.parametrize(
    ("how", "code", "reason", "last"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL", "rank=1"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "SIGSEGV", "rank=1"),
        ("sys.exit(5)", 5, "exit code 5", "rank=1"),
        ("sys.exit('out of data')", 1, "exit code 1", "out of data"),
        ("os._exit(6)", 6, "exit code 6", "rank=1"),
        ("raise", 1, "exit code 1", "ValueError: the loss is not a number"),
    ],
)
def test_the_first_failure_ends_the_run(shell: Shell, kind: str, how: str, code: int, reason: str, last: str) -> None:
    shell.script(FAILS, "t.py")
    run = shell.covey("run", "-n", "3", "t.py", shell.go, how, kind, env=PATIENT)
    for rank in range(3):
        shell.heard(rank, "rank=")
    shell.release()
    assert run.wait() == code, run.tail()
    report = run.text()[run.text().index("first failure:") :]
    assert re.match(rf"first failure: rank 1 \(worker:1\) on \S+: .*{reason}", report), report
    lines = [line.removeprefix("  | ") for line in report.splitlines() if line.startswith("  | ")]
    assert lines[-1] == last, report
    assert f"its last lines of {shell.logs}/worker_1.log:" in report
    assert re.search(r"the others at that moment:\n  rank 0 on .*\n  rank 2 on ", report)
    assert shell.log("scheduler").count("Traceback") == (1 if how == "raise" else 0), shell.log("scheduler")
    shell.nobody()


def test_the_report_says_what_the_others_were_doing(shell: Shell) -> None:
    script = "import covey, time\ncovey.init()\ncovey.report(7 + covey.get_rank(), 'forward')\nprint('up', flush=True)\n"
    shell.script(script + "time.sleep(1000)\n", "t.py")
    run = shell.covey("run", "-n", "2", "t.py", env=PATIENT)
    until(lambda: "up" in shell.log(0) and "up" in shell.log(1), "both to be up")
    until(lambda: [n["step"] for n in shell.nodes()[1:]] == [7, 8], "both to have reported")
    os.kill(next(n["pid"] for n in shell.nodes() if n["rank"] == 1), signal.SIGKILL)
    assert run.wait() == 137, run.tail()
    assert re.search(r"rank 0 on \S+: alive, step 7, forward", run.text())


def test_what_fails_before_it_joins(shell: Shell) -> None:
    shell.script("import os\nimport covey\nif os.environ['RANK'] == '1':\n    from math import nothing\ncovey.init()\n", "t.py")
    run = shell.ask("run", "-n", "3", "t.py", env=PATIENT)
    assert run.code == 1, run.tail()
    assert "first failure: rank 1" in run.text() and "ImportError: cannot import name 'nothing'" in run.text()
    shell.nobody()


def test_a_script_that_is_not_python_fails_with_a_sentence_of_python(shell: Shell) -> None:
    shell.script("def f(:\n", "t.py")
    run = shell.ask("run", "-n", "2", "t.py")
    assert run.code == 1, run.tail()
    assert "SyntaxError" in run.text() and 't.py", line 1' in run.text()


EARLY = """
import pathlib, sys, time
import covey

covey.init()
print("up", flush=True)
while covey.get_rank() == 1 and not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
print("done")
"""


def test_a_rank_that_finishes_early_is_no_failure(shell: Shell) -> None:
    shell.script(EARLY, "t.py")
    run = shell.covey("run", "-n", "2", "t.py", shell.go)
    shell.heard("scheduler", "worker:0 left")
    shell.heard(1, "up")
    assert run.alive
    shell.release()
    assert run.wait() == 0, run.tail()
    assert "done" in shell.log(1)


def test_what_a_rank_started_ends_with_it(shell: Shell) -> None:
    """Also when it made itself a group, a session, or an orphan."""
    shell.script(
        "import os, subprocess, sys, time\n"
        "for more in ({}, {'process_group': 0}, {'start_new_session': True}): subprocess.Popen(['sleep', '1000'], **more)\n"
        "subprocess.run(['sh', '-c', 'sleep 1000 &'])\nprint('up', flush=True)\n"
        "if os.environ['RANK'] == '0': sys.exit(0)\ntime.sleep(1000)\n",
        "t.py",
    )
    run = shell.covey("run", "-n", "2", "t.py")
    shell.heard(0, "up")
    shell.heard(1, "up")
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.tail()
    assert not [p.cmdline() for p in shell.mine() if p.name() == "sleep"]


# -- signals ---------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_everything_in_order(shell: Shell) -> None:
    run = shell.covey("run", "-n", "3", shell.default, shell.go, env=PATIENT)
    for rank in range(3):
        shell.heard(rank, "rank=")
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    assert run.wait() == 130, run.tail()
    assert "the run ended: interrupted by Ctrl-C" in run.text() and "Traceback" not in run.text()
    for rank in range(3):
        assert "Traceback" not in shell.log(rank), shell.log(rank)
        assert re.search(r"this node ends: .*Ctrl-C", shell.log(rank)), shell.log(rank)
    assert re.search("cluster ended: .*Ctrl-C", shell.log("scheduler"))
    shell.nobody()


# Ends only when it is killed.
STUBBORN = """
import signal, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print("up", flush=True)
time.sleep(1000)
"""


def test_ctrl_c_twice_ends_at_once(shell: Shell) -> None:
    shell.script(STUBBORN, "t.py")
    run = shell.covey("run", "-n", "2", "t.py", env=PATIENT)
    shell.heard(0, "up")
    shell.heard(1, "up")
    os.killpg(run.pid, signal.SIGINT)
    run.wait_for("Ctrl-C again ends at once")
    assert run.alive
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait() == 130, run.tail()
    assert "Traceback" not in run.text(), run.text()
    shell.nobody()


def test_the_grace_period_has_an_end(shell: Shell) -> None:
    shell.script(STUBBORN, "t.py")
    run = shell.covey("run", "-n", "2", "--grace", "0.2", "t.py")
    shell.heard(0, "up")
    shell.heard(1, "up")
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.tail()
    shell.nobody()


def test_ctrl_c_before_the_cluster_has_formed(shell: Shell) -> None:
    run = shell.covey("run", "-n", "4", "--local", "2", "--master", f"127.0.0.1:{shell.port}", shell.default, env=PATIENT)
    shell.heard("scheduler", "joined: .* brings 2 workers")
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.tail()
    assert "interrupted by Ctrl-C" in run.text() and "Traceback" not in run.text()
    shell.nobody()


# Saves its work when it is asked to go, which takes a moment.
SAVES = """
import signal, sys, time

def save(*_):
    time.sleep(0.3)
    print("saved", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
if "covey" in sys.argv:
    import covey
    covey.init()
print("up", flush=True)
while True:
    time.sleep(0.02)
"""


@pytest.mark.parametrize("kind", ["covey", "plain"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_agent_is_asked_to_leave(shell: Shell, kind: str, number: signal.Signals, code: int) -> None:
    """Its workers are asked too, once, and have the grace period to save their work."""
    shell.script(SAVES.replace("SIGTERM", number.name), "t.py")
    run = shell.covey("run", "-n", "2", "t.py", kind, env=PATIENT)
    shell.heard(0, "up")
    shell.heard(1, "up")
    run.signal(number)
    assert run.wait() == code, run.tail()
    assert [shell.log(rank).count("saved") for rank in (0, 1)] == [1, 1], shell.log(0)
    assert f"asked to leave ({number.name})" in run.text()
    for text in (run.text(), shell.log(0), shell.log(1), shell.log("scheduler")):
        assert "Traceback" not in text and "Exception" not in text, text
    shell.nobody()


def test_sigterm_to_the_agent_of_a_script_without_handlers(shell: Shell) -> None:
    run = shell.covey("run", "-n", "2", shell.default, shell.go, env=PATIENT)
    shell.heard(0, "rank=")
    shell.heard(1, "rank=")
    run.signal(signal.SIGTERM)
    assert run.wait() == 143, run.tail()
    assert "asked to leave (SIGTERM)" in run.text()
    for text in (run.text(), shell.log(0), shell.log(1), shell.log("scheduler")):
        assert "Traceback" not in text and "Exception" not in text, text
    shell.nobody()


@pytest.mark.parametrize("kind", ["covey", "plain"])
def test_sigterm_to_a_worker_ends_the_run_with_its_code(shell: Shell, kind: str) -> None:
    shell.script(FAILS, "t.py")
    run = shell.covey("run", "-n", "2", "t.py", shell.go, "pass", kind, env=PATIENT)
    shell.heard(0, "rank=0")
    shell.heard(1, "rank=1")
    os.kill(next(n["pid"] for n in shell.nodes() if n["rank"] == 0 and n["role"] == "worker"), signal.SIGTERM)
    assert run.wait() == 143, run.tail()
    assert re.search(r"first failure: rank 0 .*(SIGTERM|143)", run.text())
    for text in (run.text(), shell.log(0), shell.log(1)):
        assert "Traceback" not in text and "Exception" not in text, text
    shell.nobody()


# -- kill -9 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_nothing_outlives_a_killed_agent(shell: Shell, start: str) -> None:
    shell.script(STUBBORN, "t.py")
    run = shell.covey("run", "-n", "3", "--start", start, "t.py", env=PATIENT)
    for rank in range(3):
        shell.heard(rank, "up")
    pids = {node["pid"] for node in shell.nodes()}
    assert len(pids) == 4 and 0 not in pids
    assert pids < {process.pid for process in shell.mine()}
    run.kill()
    shell.nobody()
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_nobody_notices_the_death_of_the_template(shell: Shell) -> None:
    run = shell.covey("run", "-n", "2", shell.default, shell.go)
    shell.heard(0, "rank=0")
    shell.heard(1, "rank=1")
    template = shell.template(run)
    template.kill()
    until(lambda: shell.template(run).pid != template.pid, "another template")
    shell.release()
    assert run.wait() == 0, run.tail()
    assert "done" in shell.log(0) and "done" in shell.log(1)
    shell.nobody()


def test_a_new_template_serves_the_next_lives(shell: Shell) -> None:
    shell.script(FAILS, "t.py")
    die_once = "sys.exit(0 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' else 9)"
    shell.script(FAILS.replace("rank == 1 and ", ""), "t.py")
    run = shell.covey("run", "-n", "2", "--max-restarts", "1", "t.py", shell.go, die_once, "covey")
    shell.heard(0, "rank=0")
    shell.heard(1, "rank=1")
    shell.template(run).kill()
    shell.release()
    assert run.wait() == 0, run.tail()
    assert [shell.log(rank).count("rank=") for rank in (0, 1)] == [2, 2]
    shell.nobody()


def test_a_killed_scheduler_is_started_again(shell: Shell) -> None:
    run = shell.covey("run", "-n", "2", shell.default, shell.go, env={"MS_NODE_TIMEOUT": 600})
    shell.heard(0, "rank=0")
    shell.heard(1, "rank=1")
    for life in (2, 3):
        scheduler, *workers = shell.nodes()
        os.kill(scheduler["pid"], signal.SIGKILL)
        shell.heard("scheduler", "scheduler of cluster", count=life)
        shell.heard("scheduler", "cluster ready: every member is here again", count=life - 1)
        found, *again = shell.nodes()
        assert found["pid"] != scheduler["pid"]
        fixed = ("node_id", "rank", "pid", "incarnation", "restarts", "state", "host", "log")
        assert [[node[key] for key in fixed] for node in again] == [[node[key] for key in fixed] for node in workers]
    assert len(set(re.findall(r"scheduler of cluster (\w+)", shell.log("scheduler")))) == 1
    shell.release()
    assert run.wait() == 0, run.tail()
    assert "done" in shell.log(0) and "done" in shell.log(1)
    shell.nobody()


def test_a_scheduler_that_dies_while_its_workers_finish_hears_of_it_afterwards(shell: Shell) -> None:
    run = shell.covey("run", "-n", "2", shell.default, shell.go, env={"MS_NODE_TIMEOUT": 600})
    shell.heard(0, "rank=0")
    shell.heard(1, "rank=1")
    scheduler = psutil.Process(shell.nodes()[0]["pid"])
    scheduler.suspend()  # so that nobody is there to hear the end of the workers
    shell.release()
    until(lambda: "done" in shell.log(0) and "done" in shell.log(1), "both to finish")
    scheduler.kill()
    assert run.wait() == 0, run.tail()
    assert "all 2 workers finished" in run.text()
    shell.nobody()


def test_a_scheduler_that_always_dies_is_given_up(shell: Shell) -> None:
    """A recovery folder that cannot be written is the scheduler's own sentence, not an endless series of lives."""
    (shell.folder / "a-file").write_text("no folder")
    run = shell.ask("run", "-n", "1", "--recovery-path", shell.folder / "a-file" / "below", shell.default)
    assert run.code in (40, 41), run.tail()
    assert "Traceback" not in run.text() + shell.log("scheduler")
    assert shell.log("scheduler").strip(), "the scheduler says why"
    shell.nobody()


def test_a_scheduler_that_is_killed_again_and_again_is_given_up(shell: Shell) -> None:
    run = shell.covey("run", "-n", "1", shell.default, shell.go, env={"MS_NODE_TIMEOUT": 600})
    shell.heard(0, "rank=0")
    for life in range(1, 7):
        shell.heard("scheduler", "scheduler of cluster", count=life)
        [scheduler] = until(lambda: [p for p in shell.mine() if "covey.node.serve" in p.cmdline()], "a scheduler")
        scheduler.kill()
        scheduler.wait()
    assert run.wait() == 31, run.tail()
    assert re.search(r"the scheduler died 6 times \(SIGKILL\)", run.text())
    shell.nobody()


STEPS = """
import pathlib, sys, time
import numpy as np
import covey, torch

covey.init()
step = 0
while True:
    step += 1
    mean = covey.all_reduce(np.array([step, float(pathlib.Path(sys.argv[1]).exists())]), "mean")
    assert mean[0] == step, (mean, step)
    print("step", step, flush=True)
    if mean[1] == 1.0:
        break
    time.sleep(0.01)
"""


def test_collectives_go_on_while_the_scheduler_is_killed(shell: Shell) -> None:
    shell.script(STEPS, "t.py")
    run = shell.covey("run", "-n", "3", "t.py", shell.go, env={"MS_NODE_TIMEOUT": 600})
    shell.heard(2, "step 3")
    scheduler, *workers = shell.nodes()
    os.kill(scheduler["pid"], signal.SIGKILL)
    shell.heard("scheduler", "cluster ready: every member is here again")
    now = shell.log(0).count("step")
    shell.heard(0, f"step {now + 10}\n")
    assert [[n["rank"], n["pid"], n["incarnation"]] for n in shell.nodes()[1:]] == [
        [n["rank"], n["pid"], n["incarnation"]] for n in workers
    ]
    shell.release()
    assert run.wait() == 0, run.tail()
    assert len({shell.log(rank).splitlines()[-1] for rank in range(3)}) == 1
    assert all(shell.log(rank).count("step 1\n") == 1 for rank in range(3)), "nobody was started again"
    shell.nobody()


def test_ranks_inside_a_collective_end_when_one_dies(shell: Shell) -> None:
    text = STEPS.replace("    step += 1\n", "    step += 1\n    if step == 5 and covey.get_rank() == 1: sys.exit(7)\n")
    shell.script(text, "t.py")
    run = shell.ask("run", "-n", "3", "t.py", shell.go, env=PATIENT)
    assert run.code == 7, run.tail()
    assert "first failure: rank 1 (worker:1)" in run.text()
    shell.nobody()
