"""Without recovery the first failure ends the cluster immediately, by events and not by timeouts, with its reason."""

from __future__ import annotations

import re
import signal
import textwrap

import pytest
from tests.processes.fakes import fake_scheduler
from tests.processes.harness import Cluster, Process, nodes_of

from covey.core.messages import ClusterEnded, Message, RankAssigned, Register, Registered
from covey.core.types import Failure, Role

# All timeouts are longer than a test's deadline: only events can end a process.
PATIENT = {"MS_TOPO_TIMEOUT": 1800, "MS_NODE_TIMEOUT": 600, "MS_RECEIVE_MSG_TIMEOUT": 1800}

JOINED = """
import os, signal, sys, time
import covey

covey.init()
print(f"rank={covey.get_rank()} world={covey.get_group_size()}", flush=True)
"""
FOREVER = "while True: time.sleep(60)\n"


@pytest.fixture
def patient(cluster: Cluster) -> Cluster:
    cluster.env |= PATIENT
    return cluster


def first_failure(scheduler: Process) -> str:
    """Return the scheduler's failure report: the line of the first failure and those below it."""
    assert not re.search(r"^Traceback", scheduler.text(), re.MULTILINE), scheduler.tail()
    found = re.search(r"first failure: (.*)", scheduler.text(), re.DOTALL)
    assert found, scheduler.tail()
    return found[1]


# -- deaths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_worker_ends_others_which_name_it(patient: Cluster, victim: int) -> None:
    patient.workers = 3
    scheduler, workers = patient.formed()
    workers[victim].kill()
    for node in (scheduler, *(w for w in workers if w is not workers[victim])):
        assert node.wait() == 30, node.tail()
        assert f"worker:{victim}" in node.text()
    report = first_failure(scheduler)
    assert report.startswith(f"rank {victim} (worker:{victim}) on ")
    others = ", ".join(str(rank) for rank in range(3) if rank != victim)
    assert f"ranks {others} on" in report.partition("the others at that moment:")[2]


def test_dead_parameter_server_ends_the_cluster(patient: Cluster) -> None:
    patient.env["MS_SERVER_NUM"] = 1
    patient.workers = 1
    server = patient.node("MS_SERVER", 0)
    scheduler, (worker,) = patient.formed()
    server.kill()
    assert (scheduler.wait(), worker.wait()) == (30, 30)
    assert first_failure(scheduler).startswith("rank 0 (server:0)")


def test_failure_report_has_state_of_other_ranks(patient: Cluster) -> None:
    script = patient.script(JOINED + "covey.report(41 + covey.get_rank(), 'evaluating')\n" + FOREVER)
    patient.env |= {"MS_RETRY_INTERVAL_LOWER": 0.05, "MS_RETRY_INTERVAL_UPPER": 0.1}
    scheduler, (first, _) = patient.formed(script=script)
    patient.until(lambda v: [n.step for n in nodes_of(v).values()] == [41, 42], "both to tell what they do")
    first.kill()
    scheduler.wait()
    assert re.search(r"rank 1 on \S+: alive, step 42, evaluating", first_failure(scheduler))


IN_A_GROUP = (
    JOINED
    + "covey.barrier()\n"
    + "print('in a group', flush=True)\n"
    + "if covey.get_rank() == 1: time.sleep(3600)\n"
    + "covey.barrier()\n"
)


def test_killed_rank_is_reported_before_failures_it_causes(patient: Cluster) -> None:
    """gloo raises in the survivors immediately; their errors must not be reported as the cause."""
    patient.workers = 3
    scheduler, workers = patient.formed(script=patient.script(IN_A_GROUP))
    for worker in workers:
        worker.wait_for("in a group")
    workers[1].kill()
    assert scheduler.wait() == 30, patient.tails()
    assert first_failure(scheduler).startswith("rank 1 ")
    for survivor in (workers[0], workers[2]):
        assert survivor.wait() in (1, 30)
    assert scheduler.text().count(" died: ") == 1, scheduler.tail()


def test_workers_blocked_in_a_collective_end_too(patient: Cluster) -> None:
    """Rank 1 is stopped and its connections stay open: rank 0 waits inside gloo, where no Python code runs."""
    patient.env |= {"MS_RETRY_INTERVAL_LOWER": 0.1, "MS_RETRY_INTERVAL_UPPER": 0.2, "MS_NODE_TIMEOUT": 8}
    scheduler, (stuck, still) = patient.formed(script=patient.script(IN_A_GROUP))
    stuck.wait_for("in a group")
    still.wait_for("in a group")
    still.stop()
    assert (scheduler.wait(), stuck.wait()) == (30, 30), patient.tails()
    assert "worker:1" in stuck.text() and "Traceback" not in stuck.text()
    assert first_failure(scheduler).startswith("rank 1 ")


def test_exception_ends_others_and_is_reported(patient: Cluster) -> None:
    fails = patient.script(JOINED + "raise ValueError('the loss is not a number')\n")
    scheduler = patient.scheduler()
    failing, other = patient.worker(0, script=fails), patient.worker(1)
    assert failing.wait() == 1
    assert "Traceback" in failing.text()  # its own
    assert other.wait() == 30
    assert scheduler.wait() == 1
    report = first_failure(scheduler)
    assert "ValueError: the loss is not a number" in report.splitlines()[0]
    shown = re.findall(r"  \| (.*)", report)
    assert shown[0] == "Traceback (most recent call last):" and shown[-1] == "ValueError: the loss is not a number", report
    assert "ValueError: the loss is not a number" in other.text()


@pytest.mark.parametrize(
    ("last_line", "code"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit('no data')", 1),
        ("os._exit(5)", 5),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", 130),
    ],
)
def test_every_nonzero_exit_is_a_failure(patient: Cluster, last_line: str, code: int) -> None:
    """The scheduler has the exit code if the program could send it, else a closed connection."""
    scheduler = patient.scheduler()
    failing = patient.worker(0, script=patient.script(JOINED + last_line + "\n"))
    other = patient.worker(1)
    assert failing.wait() == code, failing.tail()
    assert other.wait() == 30, other.tail()
    assert scheduler.wait() in (code, 30, 1)
    assert first_failure(scheduler).startswith("rank 0 ")


def test_exception_in_another_thread_does_not_end_the_cluster(patient: Cluster) -> None:
    script = patient.script(
        JOINED
        + "import threading\n"
        + "thread = threading.Thread(target=lambda: 1 / 0)\n"
        + "thread.start()\n"
        + "thread.join()\n"
    )
    patient.scheduler()
    patient.worker(0, script=script)
    patient.worker(1)
    patient.release()
    assert set(patient.wait().values()) == {0}


@pytest.mark.parametrize("last_line", ["sys.exit()", "sys.exit(0)", "pass"])
def test_worker_that_succeeds_early_ends_no_other(patient: Cluster, last_line: str) -> None:
    scheduler = patient.scheduler()
    early = patient.worker(0, script=patient.script(JOINED + last_line + "\n"))
    other = patient.worker(1)
    assert early.wait() == 0
    scheduler.wait_for("worker:0 left")
    assert other.alive
    patient.release()
    assert set(patient.wait().values()) == {0}


def test_first_of_two_failures_is_reported(patient: Cluster) -> None:
    """The end of the cluster makes the other worker fail as well, with its own error."""
    clumsy = patient.script(JOINED + "try:\n    time.sleep(3600)\nfinally:\n    raise RuntimeError('second')\n")
    scheduler = patient.scheduler()
    failing = patient.worker(0, script=patient.script(JOINED + "raise RuntimeError('first')\n", "first.py"))
    other = patient.worker(1, script=clumsy)
    assert (failing.wait(), scheduler.wait(), other.wait()) == (1, 1, 30)
    assert "RuntimeError: first" in first_failure(scheduler)
    assert len(re.findall("first failure", scheduler.text())) == 1


@pytest.mark.parametrize("code", [1, 3, 30, 139])
def test_failure_received_with_the_rank_is_one_line(patient: Cluster, code: int) -> None:
    """Another worker may fail before this one has processed its rank: both messages are then received together."""

    def fail_at_once(message: Message) -> list[Message]:
        failure = Failure(Role.WORKER, "1", 1, "elsewhere", code, "it failed at once")
        formed = RankAssigned(generation=1, rank=0, world=2, local_rank=0, local_world=2)
        stop = ClusterEnded("worker:1 on elsewhere: it failed at once", code, failure)
        return [Registered("fake", "0", 1), formed, stop] if isinstance(message, Register) else []

    with fake_scheduler(patient.port, fail_at_once):
        worker = patient.worker(0)
        assert worker.wait() == 30, worker.tail()
    assert "worker:1 on elsewhere: it failed at once" in worker.text()
    assert "Traceback" not in worker.text()


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", ["time.sleep(3600)", "while True: pass", "signal.pause()"])
def test_sigterm_is_a_planned_leave(patient: Cluster, busy: str) -> None:
    scheduler = patient.scheduler()
    leaving = patient.worker(0, script=patient.script(JOINED + "print('busy', flush=True)\n" + busy + "\n"))
    other = patient.worker(1)
    leaving.wait_for("busy")
    planned_leave(scheduler, leaving, other)


def test_sigterm_within_a_collective_is_a_planned_leave(patient: Cluster) -> None:
    """The main thread is blocked in gloo: the process is killed after the grace period."""
    scheduler, (stuck, other) = patient.formed(script=patient.script(IN_A_GROUP), COVEY_GRACE=1)
    stuck.wait_for("in a group")
    other.wait_for("in a group")
    planned_leave(scheduler, stuck, other)


def planned_leave(scheduler: Process, leaving: Process, other: Process) -> None:
    leaving.signal(signal.SIGTERM)
    assert leaving.wait() == 143, leaving.tail()
    assert "Traceback" not in leaving.text()
    scheduler.wait_for(r"worker:0 .*asked to leave \(SIGTERM\)")
    assert (scheduler.wait(), other.wait()) == (143, 30), scheduler.tail()
    assert "asked to leave (SIGTERM)" in first_failure(scheduler)
    assert "worker:0" in other.text() and "SIGTERM" in other.text()


def test_sigterm_handler_of_the_program_is_kept(patient: Cluster) -> None:
    script = patient.script(
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        + JOINED
        + FOREVER
    )
    patient.workers = 1
    scheduler, (worker,) = patient.formed(script=script)
    worker.signal(signal.SIGTERM)
    assert (worker.wait(), scheduler.wait()) == (0, 0)
    assert "saved" in worker.text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_scheduler_ends_the_cluster(patient: Cluster, number: signal.Signals) -> None:
    scheduler, workers = patient.formed()
    scheduler.signal(number)
    assert [node.wait() for node in (scheduler, *workers)] == [32, 32, 32]
    for node in (scheduler, *workers):
        assert f"the scheduler received {number.name}" in node.text()
        assert "Traceback" not in node.text()


def test_signal_during_formation_is_named(patient: Cluster) -> None:
    scheduler, worker = patient.scheduler(), patient.worker(0)
    patient.until(lambda v: nodes_of(v), "the worker to be registered")
    scheduler.signal(signal.SIGINT)
    assert (scheduler.wait(), worker.wait()) == (32, 32)
    assert "the scheduler received SIGINT" in worker.text()


def test_lost_scheduler_is_reported_after_node_timeout(patient: Cluster) -> None:
    scheduler, workers = patient.formed(MS_NODE_TIMEOUT=1)
    scheduler.kill()
    for worker in workers:
        assert worker.wait() == 31
        assert f"the scheduler at 127.0.0.1:{patient.port} did not come back within 1 s" in worker.text()


def test_resumed_scheduler_declares_no_node_dead(patient: Cluster) -> None:
    """As after a suspended laptop, a debugger or a migrated machine: the missed heartbeats are in its sockets."""
    script = patient.script(
        JOINED
        + "import pathlib\n"
        + "step = 0\n"
        + "while not pathlib.Path(sys.argv[1]).exists():\n"
        + "    step += 1\n"
        + "    covey.report(step)\n"
        + "    print(f'step={step}', flush=True)\n"
        + "    time.sleep(0.01)\n"
    )
    quick = {"MS_RETRY_INTERVAL_LOWER": 0.1, "MS_RETRY_INTERVAL_UPPER": 0.2}
    scheduler, workers = patient.formed(script=script, **quick, MS_NODE_TIMEOUT=3)
    scheduler.stop()
    stopped = int(re.findall(r"step=(\d+)", workers[0].text())[-1])
    workers[0].wait_for(f"step={stopped + 400}\n")  # at least 10 ms each
    scheduler.resume()
    patient.until(lambda v: all(n.step > stopped + 400 for n in nodes_of(v).values()), "beats of today")
    patient.release()
    assert [node.wait() for node in (scheduler, *workers)] == [0, 0, 0]
    assert "died" not in scheduler.text()


# -- children of a worker --------------------------------------------------------------------------------------------

CHILDREN = {
    "os.fork": "child = os.fork()\nif child == 0:\n    time.sleep(3600)\n    os._exit(0)\n",
    "multiprocessing": (
        "import multiprocessing\n"
        "process = multiprocessing.get_context('fork').Process(target=time.sleep, args=(3600,))\n"
        "process.start()\n"
        "child = process.pid\n"
    ),
    "subprocess": "import subprocess\nchild = subprocess.Popen(['sleep', '3600'], close_fds=False).pid\n",
    "spawn": (
        "import multiprocessing\n"
        "process = multiprocessing.get_context('forkserver').Process(target=time.sleep, args=(3600,))\n"
        "process.start()\n"
        "child = process.pid\n"
    ),
}


@pytest.mark.parametrize("way", CHILDREN)
def test_surviving_child_does_not_hide_death_of_worker(patient: Cluster, way: str) -> None:
    body = JOINED + CHILDREN[way] + "print(f'child={child}', flush=True)\n" + FOREVER
    script = patient.script("if __name__ == '__main__':\n" + textwrap.indent(body, "    "))  # a forkserver imports the script
    scheduler = patient.scheduler()
    parent, other = patient.worker(0, script=script), patient.worker(1)
    child = int(parent.wait_for(r"child=(\d+)")[1])
    parent.kill()
    assert (scheduler.wait(), other.wait()) == (30, 30)
    assert first_failure(scheduler).startswith("rank 0 ")
    assert child in [process.pid for process in patient.own_processes()], "the child must outlive its parent in this test"


@pytest.mark.parametrize("way", ["os.fork", "multiprocessing"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_exit_of_a_child_is_not_exit_of_its_worker(patient: Cluster, way: str, number: signal.Signals) -> None:
    """Data loaders end their children by SIGTERM, which must not affect the worker."""
    script = patient.script(
        JOINED
        + CHILDREN[way]
        + f"os.kill(child, signal.{number.name})\nos.waitpid(child, 0)\ncovey.report(7)\n"
        + "import pathlib\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\n"
    )
    patient.env |= {"MS_RETRY_INTERVAL_LOWER": 0.1, "MS_RETRY_INTERVAL_UPPER": 0.2}
    scheduler = patient.scheduler()
    parent, other = patient.worker(0, script=script), patient.worker(1)
    patient.until(lambda v: "0" in nodes_of(v) and nodes_of(v)["0"].step == 7, "the worker to continue after its child")
    patient.release()
    assert (parent.wait(), other.wait(), scheduler.wait()) == (0, 0, 0), patient.tails()


def test_exiting_child_does_not_send_leave_of_its_worker(patient: Cluster) -> None:
    script = patient.script(
        JOINED
        + "child = os.fork()\n"
        + "if child == 0:\n    sys.exit(0)\n"
        + "os.waitpid(child, 0)\nprint('child ended', flush=True)\n"
        + "import pathlib\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\n"
    )
    patient.scheduler()
    parent = patient.worker(0, script=script)
    patient.worker(1)
    parent.wait_for("child ended")
    assert nodes_of(patient.view())["0"].state == "alive"
    patient.release()
    assert set(patient.wait().values()) == {0}


# -- before formation ------------------------------------------------------------------------------------------------


def test_worker_that_dies_during_formation_frees_its_rank(patient: Cluster) -> None:
    patient.scheduler()
    first = patient.worker(0)
    patient.until(lambda v: nodes_of(v), "the first worker to be registered")
    first.kill()
    patient.until(lambda v: not nodes_of(v), "its place to be free")
    second, other = patient.worker(0), patient.worker(1)
    patient.release()
    assert (second.wait(), other.wait()) == (0, 0)
