"""End of a run of `covey run`: the first failure, and signals."""

from __future__ import annotations

import os
import re
import signal

import psutil
import pytest
from tests.processes.command import FAILS, PATIENT, STUBBORN, Shell
from tests.processes.harness import until

# -- first failure ---------------------------------------------------------------------------------------------------


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
def test_first_failure_ends_the_run(shell: Shell, kind: str, how: str, code: int, reason: str, last: str) -> None:
    shell.script(FAILS, "t.py")
    run = shell.covey("run", "-n", "3", "t.py", shell.go, how, kind, env=PATIENT)
    for rank in range(3):
        shell.wait_for_log(rank, "rank=")
    shell.release()
    assert run.wait() == code, run.tail()
    report = run.text()[run.text().index("first failure:") :]
    assert re.match(rf"first failure: rank 1 \(worker:1\) on \S+: .*{reason}", report), report
    lines = [line.removeprefix("  | ") for line in report.splitlines() if line.startswith("  | ")]
    assert lines[-1] == last, report
    log = f"{shell.logs}/worker_1.log"
    assert (f"its exception (its log is {log}):" if how == "raise" else f"its last lines of {log}:") in report
    assert re.search(r"the others at that moment:\n  ranks 0, 2 on ", report)
    assert shell.log("scheduler").count("Traceback") == (1 if how == "raise" else 0), shell.log("scheduler")
    shell.assert_no_processes()


# As libraries do that report leaks when the interpreter ends.
TALKS_AFTERWARDS = """
import atexit, os, sys, time

if "covey" in sys.argv:
    import covey
    covey.init()
atexit.register(lambda: print("leaked something\\n" * 40, file=sys.stderr))

def fail():
    raise ValueError("the loss is not a number")

if os.environ["RANK"] == "1":
    fail()
time.sleep(1000)
"""


@pytest.mark.parametrize(("kind", "start"), [("covey", "fork"), ("plain", "fork"), ("covey", "exec")])
def test_report_shows_exception_despite_later_output(shell: Shell, kind: str, start: str) -> None:
    shell.script(TALKS_AFTERWARDS, "t.py")
    run = shell.run_command("run", "-n", "2", "--start", start, "t.py", kind, env=PATIENT)
    assert run.code == 1, run.tail()
    shown = [line.removeprefix("  | ") for line in run.text().splitlines() if line.startswith("  | ")]
    assert shown[0] == "Traceback (most recent call last):", run.text()
    assert any(line.endswith('t.py", line 13, in <module>') for line in shown), run.text()
    assert any(line.endswith('t.py", line 10, in fail') for line in shown), run.text()
    assert shown[-1] == "ValueError: the loss is not a number", run.text()
    assert shell.log(1).count("leaked something") == 40
    shell.assert_no_processes()


def test_exception_in_forked_process_is_not_reported_as_its_ranks(shell: Shell) -> None:
    """The process that the script forked runs the same code as the rank itself."""
    script = "import os, sys\nif os.fork() == 0:\n    raise ValueError('of the other')\nos.wait()\n"
    shell.script(script + "print('own line', flush=True)\nsys.exit(7)\n", "t.py")
    run = shell.run_command("run", "-n", "1", "t.py", env=PATIENT)
    assert run.code == 7, run.tail()
    assert "its last lines of" in run.text() and "its exception" not in run.text()
    assert "  | own line" in run.text()


@pytest.mark.parametrize(
    ("line", "code", "last"),
    [
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("raise SystemExit(9)", 9, "up"),
        ("covey.init(); covey.set_seed(-1)", 10, "covey: "),
        ("os.environ['MS_SCHED_PORT'] = 'x'; covey.init()", 10, "covey: MS_SCHED_PORT"),
    ],
)
def test_report_without_script_exception_shows_log_tail(shell: Shell, line: str, code: int, last: str) -> None:
    """Ctrl-C, an exit and a refusal by covey have no traceback."""
    shell.script(f"import os\nimport covey\nprint('up', flush=True)\n{line}\n", "t.py")
    run = shell.run_command("run", "-n", "1", "t.py", env=PATIENT)
    assert run.code == code, run.tail()
    shown = [line.removeprefix("  | ") for line in run.text().splitlines() if line.startswith("  | ")]
    assert shown[-1].startswith(last), run.text()
    assert "its exception" not in run.text() or "Traceback" not in run.text(), run.text()


def test_early_exit_while_others_wait_ends_the_run(shell: Shell) -> None:
    shell.script("import covey\ncovey.init()\nfor _ in range(5 + (covey.get_rank() != 1)):\n    covey.barrier()\n", "t.py")
    run = shell.run_command("run", "-n", "3", "t.py", env=PATIENT)
    assert run.code == 30, run.tail()
    assert re.search(r"rank 1 has finished its script, but rank [02] waits for it in collective -1\.5", run.text())
    shell.assert_no_processes()


def test_report_has_state_of_other_ranks(shell: Shell) -> None:
    script = "import covey, time\ncovey.init()\ncovey.report(7 + covey.get_rank(), 'forward')\nprint('up', flush=True)\n"
    shell.script(script + "time.sleep(1000)\n", "t.py")
    run = shell.covey("run", "-n", "2", "t.py", env=PATIENT)
    until(lambda: "up" in shell.log(0) and "up" in shell.log(1), "both to be up")
    until(lambda: [n["step"] for n in shell.nodes()[1:]] == [7, 8], "both to have reported")
    os.kill(next(n["pid"] for n in shell.nodes() if n["rank"] == 1), signal.SIGKILL)
    assert run.wait() == 137, run.tail()
    assert re.search(r"rank 0 on \S+: alive, step 7, forward", run.text())


def test_failure_before_join_ends_the_run(shell: Shell) -> None:
    shell.script("import os\nimport covey\nif os.environ['RANK'] == '1':\n    from math import nothing\ncovey.init()\n", "t.py")
    run = shell.run_command("run", "-n", "3", "t.py", env=PATIENT)
    assert run.code == 1, run.tail()
    assert "first failure: rank 1" in run.text() and "ImportError: cannot import name 'nothing'" in run.text()
    shell.assert_no_processes()


def test_script_with_syntax_error_prints_message_of_python(shell: Shell) -> None:
    shell.script("def f(:\n", "t.py")
    run = shell.run_command("run", "-n", "2", "t.py")
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


def test_rank_that_finishes_early_is_not_a_failure(shell: Shell) -> None:
    shell.script(EARLY, "t.py")
    run = shell.covey("run", "-n", "2", "t.py", shell.go)
    shell.wait_for_log("scheduler", "worker:0 left")
    shell.wait_for_log(1, "up")
    assert run.alive
    shell.release()
    assert run.wait() == 0, run.tail()
    assert "done" in shell.log(1)


def test_descendants_of_a_rank_end_with_it(shell: Shell) -> None:
    """Also if they have their own group or session, or are orphans."""
    shell.script(
        "import os, subprocess, sys, time\n"
        "for more in ({}, {'process_group': 0}, {'start_new_session': True}): subprocess.Popen(['sleep', '1000'], **more)\n"
        "subprocess.run(['sh', '-c', 'sleep 1000 &'])\nprint('up', flush=True)\n"
        "if os.environ['RANK'] == '0': sys.exit(0)\ntime.sleep(1000)\n",
        "t.py",
    )
    run = shell.covey("run", "-n", "2", "t.py")
    shell.wait_for_log(0, "up")
    shell.wait_for_log(1, "up")
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.tail()
    assert not shell.own_processes(lambda process: process.name() == "sleep")


# -- signals ---------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_run_gracefully(shell: Shell) -> None:
    run = shell.covey("run", "-n", "3", shell.default, shell.go, env=PATIENT)
    for rank in range(3):
        shell.wait_for_log(rank, "rank=")
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    assert run.wait() == 130, run.tail()
    assert "the run ended: interrupted by Ctrl-C" in run.text() and "Traceback" not in run.text()
    for rank in range(3):
        assert "Traceback" not in shell.log(rank), shell.log(rank)
        assert re.search(r"this node exits: .*Ctrl-C", shell.log(rank)), shell.log(rank)
    assert re.search("cluster ended: .*Ctrl-C", shell.log("scheduler"))
    shell.assert_no_processes()


def test_ctrl_z_stops_all_and_fg_continues_all(shell: Shell) -> None:
    """If only the run were stopped, it would count as a lost host while its workers continue."""
    run = shell.covey("run", "-n", "2", shell.default, shell.go)
    for rank in range(2):
        shell.wait_for_log(rank, "rank=")

    def standing() -> bool:
        states = [p.status() for p in shell.own_processes(lambda p: "covey: template" not in "".join(p.cmdline()))]
        return len(states) == 4 and set(states) == {psutil.STATUS_STOPPED}

    os.killpg(run.pid, signal.SIGTSTP)  # as a terminal does
    until(standing, "the run, its scheduler and its workers to stand still", details=shell.tails)
    os.killpg(run.pid, signal.SIGCONT)
    shell.release()
    assert run.wait() == 0, run.tail()
    shell.assert_no_processes()


def test_second_ctrl_c_ends_run_immediately(shell: Shell) -> None:
    shell.script(STUBBORN, "t.py")
    run = shell.covey("run", "-n", "2", "t.py", env=PATIENT)
    shell.wait_for_log(0, "up")
    shell.wait_for_log(1, "up")
    os.killpg(run.pid, signal.SIGINT)
    run.wait_for("press Ctrl-C again to kill it")
    assert run.alive
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait() == 130, run.tail()
    assert "Traceback" not in run.text(), run.text()
    shell.assert_no_processes()


def test_worker_is_killed_after_grace_period(shell: Shell) -> None:
    shell.script(STUBBORN, "t.py")
    run = shell.covey("run", "-n", "2", "--grace", "0.2", "t.py")
    shell.wait_for_log(0, "up")
    shell.wait_for_log(1, "up")
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.tail()
    shell.assert_no_processes()


def test_ctrl_c_during_formation_ends_run(shell: Shell) -> None:
    run = shell.covey("run", "-n", "4", "--local", "2", "--master", f"127.0.0.1:{shell.port}", shell.default, env=PATIENT)
    shell.wait_for_log("scheduler", "joined: .* brings 2 workers")
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.tail()
    assert "interrupted by Ctrl-C" in run.text() and "Traceback" not in run.text()
    shell.assert_no_processes()


# Saves its work on request, which takes a moment.
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
def test_sigterm_to_agent_ends_run(shell: Shell, kind: str, number: signal.Signals, code: int) -> None:
    """Its workers get the signal too, once, and have the grace period to save their work."""
    shell.script(SAVES.replace("SIGTERM", number.name), "t.py")
    run = shell.covey("run", "-n", "2", "t.py", kind, env=PATIENT)
    shell.wait_for_log(0, "up")
    shell.wait_for_log(1, "up")
    run.signal(number)
    assert run.wait() == code, run.tail()
    assert [shell.log(rank).count("saved") for rank in (0, 1)] == [1, 1], shell.log(0)
    assert f"asked to leave ({number.name})" in run.text()
    for text in (run.text(), shell.log(0), shell.log(1), shell.log("scheduler")):
        assert "Traceback" not in text and "Exception" not in text, text
    shell.assert_no_processes()


def test_sigterm_to_agent_ends_script_without_handlers(shell: Shell) -> None:
    run = shell.covey("run", "-n", "2", shell.default, shell.go, env=PATIENT)
    shell.wait_for_log(0, "rank=")
    shell.wait_for_log(1, "rank=")
    run.signal(signal.SIGTERM)
    assert run.wait() == 143, run.tail()
    assert "asked to leave (SIGTERM)" in run.text()
    for text in (run.text(), shell.log(0), shell.log(1), shell.log("scheduler")):
        assert "Traceback" not in text and "Exception" not in text, text
    shell.assert_no_processes()


@pytest.mark.parametrize("kind", ["covey", "plain"])
def test_sigterm_to_worker_ends_run_with_its_code(shell: Shell, kind: str) -> None:
    shell.script(FAILS, "t.py")
    run = shell.covey("run", "-n", "2", "t.py", shell.go, "pass", kind, env=PATIENT)
    shell.wait_for_log(0, "rank=0")
    shell.wait_for_log(1, "rank=1")
    os.kill(next(n["pid"] for n in shell.nodes() if n["rank"] == 0 and n["role"] == "worker"), signal.SIGTERM)
    assert run.wait() == 143, run.tail()
    assert re.search(r"first failure: rank 0 .*(SIGTERM|143)", run.text())
    for text in (run.text(), shell.log(0), shell.log(1)):
        assert "Traceback" not in text and "Exception" not in text, text
    shell.assert_no_processes()


def test_sighup_stays_ignored_under_nohup(shell: Shell) -> None:
    run = shell.covey("run", "-n", "2", shell.default, shell.go, before=["nohup"])
    shell.wait_for_log(0, "rank=0")
    shell.wait_for_log(1, "rank=1")
    run.signal(signal.SIGHUP)
    assert shell.run_command("status").code == 0, run.tail()  # by then the scheduler would have received it
    shell.release()
    assert run.wait() == 0, run.tail()


# -- output ----------------------------------------------------------------------------------------------------------


def test_blocked_stdout_does_not_stop_the_run(shell: Shell) -> None:
    """As with a paused pager: the output waits longer than the node timeout, and the run continues."""
    talks = "import covey, time\ncovey.init()\nfor n in range(2000):\n    print('line', n, 'x' * 100)\n"
    shell.script(talks + "time.sleep(10)\nprint('finished', flush=True)\n", "t.py")
    ours, theirs = os.pipe()
    run = shell.covey("run", "-n", "2", "--node-timeout", "8", "t.py", stdout=theirs, env=PATIENT)
    os.close(theirs)
    for rank in range(2):
        shell.wait_for_log(rank, "finished")
    assert not re.search("suspect|died", shell.log("scheduler")), shell.log("scheduler")
    with open(ours, "rb") as unread:
        assert unread.read().count(b"line") == 2000
    assert run.wait() == 0
