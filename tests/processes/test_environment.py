"""MindSpore's variables and their effects on real processes; `covey.settings` has the tests of reading them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest
from tests.processes.fakes import accept_and_close, fake_scheduler
from tests.processes.harness import Cluster, Process, free_port, nodes_of, until
from tests.requirements import HOSTS, MOUNTS, OWN_MOUNTS, needs

from covey.core.messages import Heartbeat, Message, RankAssigned, Register, Registered
from covey.core.types import Phase

SAID = "import covey\ntry:\n    covey.{call}\nexcept covey.CoveyError as error:\n    print(error)\n"
QUICK = {"MS_RETRY_INTERVAL_LOWER": 0.1, "MS_RETRY_INTERVAL_UPPER": 0.2}


def ranks(*workers: Process) -> list[int]:
    return [int(worker.wait_for(r"rank=(\d+)")[1]) for worker in workers]


# -- roles, addresses, order -----------------------------------------------------------------------------------------


def test_roles_have_separate_ids_and_only_workers_run_training_code(cluster: Cluster) -> None:
    cluster.workers = 1
    cluster.env["MS_SERVER_NUM"] = 2
    scheduler = cluster.scheduler()
    worker = cluster.worker(0)
    servers = [cluster.node("MS_SERVER", 0), cluster.node("MS_PSERVER", 1)]
    worker.wait_for("rank=0 world=1 local=0/1")
    view = cluster.until(lambda v: v.phase is Phase.READY, "the cluster to form")
    assert [(str(n.role), n.node_id, n.rank) for n in view.nodes] == [
        ("scheduler", "sched", 0),
        ("pserver", "1", 1),
        ("server", "0", 0),
        ("worker", "0", 0),
    ]
    cluster.release()
    assert set(cluster.wait().values()) == {0}
    for node in (scheduler, *servers):
        assert "rank=" not in node.text() and "done" not in node.text()


def test_server_does_not_need_ms_worker_num(cluster: Cluster) -> None:
    cluster.workers = 1
    cluster.env["MS_SERVER_NUM"] = 1
    cluster.scheduler()
    server = cluster.node("MS_PSERVER", 0, MS_WORKER_NUM=None)
    worker = cluster.worker(0)
    server.wait_for("server 0 of 1")
    cluster.release()
    assert (worker.wait(), server.wait()) == (0, 0)


def test_scheduler_never_returns_to_training_code(cluster: Cluster) -> None:
    script = cluster.script(
        "import atexit, covey\n"
        "atexit.register(print, 'an exit function ran')\n"
        "try:\n"
        "    covey.init()\n"
        "finally:\n"
        "    print('the training code ran', covey.get_rank())\n"
    )
    cluster.workers = 1
    scheduler = cluster.scheduler(script=script)
    worker = cluster.worker(script=script)
    assert (worker.wait(), scheduler.wait()) == (0, 0)
    assert "the training code ran 0" in worker.text()
    assert "ran" not in scheduler.text()


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("[::1]", "::1"), ("localhost", "")])
def test_workers_connect_by_ipv4_ipv6_and_name(cluster: Cluster, host: str, address: str) -> None:
    cluster.port = free_port("::1" if ":" in host else "127.0.0.1")
    cluster.host = host
    cluster.formed()
    cluster.host = host.strip("[]")
    nodes = nodes_of(cluster.view())
    assert {node.address for node in nodes.values()} <= ({address} if address else {"127.0.0.1", "::1"})
    cluster.release()
    assert set(cluster.wait().values()) == {0}


def test_workers_started_before_scheduler_join(cluster: Cluster) -> None:
    cluster.env |= QUICK
    first, second = cluster.worker(0), cluster.worker(1)
    accept_and_close(cluster.port, 6)
    cluster.scheduler()
    assert ranks(first, second) == [0, 1]
    cluster.release()
    assert set(cluster.wait().values()) == {0}


def connections_reset(pid: int) -> int:
    """Return the number of reset connections in the network namespace of a process; 0 while it is still in ours."""
    if Path(f"/proc/{pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
        return 0
    names, values = (line.split() for line in Path(f"/proc/{pid}/net/snmp").read_text().splitlines() if line.startswith("Tcp:"))
    return int(dict(zip(names, values, strict=True))["EstabResets"])


@needs(*HOSTS)
def test_worker_connected_to_itself_does_not_join(cluster: Cluster) -> None:
    """A port of the ephemeral range can connect to itself: both ends of the connection are then the worker's."""
    cluster.port, cluster.workers = 40000, 1
    cluster.env |= QUICK
    narrow = "ip link set lo up && echo '40000 40003' > /proc/sys/net/ipv4/ip_local_port_range && exec \"$@\""
    worker = cluster.worker(0, before=["unshare", "--net", "sh", "-c", narrow, "sh"])
    until(lambda: not worker.alive or connections_reset(worker.pid), "the worker to meet itself")
    assert worker.alive, worker.tail()
    scheduler = cluster.scheduler(before=["nsenter", "--net", f"--target={worker.pid}"])
    scheduler.wait_for("scheduler of cluster")
    assert ranks(worker) == [0]
    cluster.release()
    assert (worker.wait(), scheduler.wait()) == (0, 0)


# -- ranks -----------------------------------------------------------------------------------------------------------


def test_numeric_ids_claim_ranks_and_names_fill_the_rest_in_natural_order(cluster: Cluster) -> None:
    cluster.workers = 5
    _, workers = cluster.formed("node-10", "b", 3, "node-2", "a")
    assert ranks(*workers) == [4, 1, 3, 2, 0]


def test_explicit_rank_is_kept_beside_automatic_ones(cluster: Cluster) -> None:
    cluster.workers = 3
    _, (one, two, explicit) = cluster.formed(None, None, 1)
    assert ranks(explicit) == [1]
    assert sorted(ranks(one, two)) == [0, 2]
    assert len(nodes_of(cluster.view())) == 3


def test_ranks_are_contiguous_per_host_and_local_ranks_follow_host_id(cluster: Cluster) -> None:
    cluster.workers = 4
    cluster.scheduler()
    east = [cluster.worker("a", COVEY_HOST_ID="east"), cluster.worker("c", COVEY_HOST_ID="east")]
    west = [cluster.worker("b", COVEY_HOST_ID="west"), cluster.worker("d", COVEY_HOST_ID="west")]
    assert ranks(*east, *west) == [0, 1, 2, 3]
    assert [w.wait_for(r"local=(\d/\d)")[1] for w in (*east, *west)] == ["0/2", "1/2", "0/2", "1/2"]


# -- address of a worker ---------------------------------------------------------------------------------------------


def test_worker_address_is_ms_worker_ip(cluster: Cluster) -> None:
    """Return the address in the view, and the one at which its part of the group listens."""
    script = cluster.script(
        "import sys, time, pathlib, covey\n"
        "covey.init()\n"
        "covey.barrier()\n"
        "print('met', flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\n"
    )
    cluster.scheduler()
    named = cluster.worker(0, script=script, MS_WORKER_IP="127.0.0.2")
    plain = cluster.worker(1, script=script)
    named.wait_for("met")
    plain.wait_for("met")
    addresses = {node_id: node.address for node_id, node in nodes_of(cluster.view()).items()}
    assert addresses == {"0": "127.0.0.2", "1": "127.0.0.1"}
    listening = {c.laddr.ip for c in psutil.Process(named.pid).net_connections() if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.2"}
    cluster.release()
    assert set(cluster.wait().values()) == {0}


@pytest.mark.parametrize(("ours", "theirs"), [("::1", "127.0.0.1"), ("127.0.0.1", "::1")])
def test_worker_ip_of_other_ip_version_is_refused_naming_both(cluster: Cluster, ours: str, theirs: str) -> None:
    refused_with_both(cluster.worker(0, MS_WORKER_IP=ours, MS_SCHED_HOST=theirs), ours, theirs)


@needs(MOUNTS)
def test_scheduler_name_of_other_ip_version_is_refused_naming_both(cluster: Cluster) -> None:
    (cluster.folder / "hosts").write_text("127.0.0.1 localhost\n")
    mount = ["sh", "-c", f'mount --bind {cluster.folder}/hosts /etc/hosts && exec "$@"', "-"]
    worker = cluster.worker(0, before=[*OWN_MOUNTS, *mount], MS_WORKER_IP="::1", MS_SCHED_HOST="localhost")
    refused_with_both(worker, "::1", "localhost")


def refused_with_both(worker: Process, ours: str, theirs: str) -> None:
    assert worker.wait() == 10
    assert f"MS_WORKER_IP={ours}" in worker.text() and f"MS_SCHED_HOST={theirs}" in worker.text()


# -- timeouts --------------------------------------------------------------------------------------------------------


def test_topo_timeout_names_present_and_missing_nodes(cluster: Cluster) -> None:
    cluster.workers = 5
    cluster.env |= QUICK
    workers = [cluster.worker(0), cluster.worker("b"), cluster.worker(2)]
    for worker in workers:  # each tries to connect five times a second
        worker.wait_for(f"127.0.0.1:{cluster.port}")
    scheduler = cluster.scheduler(MS_TOPO_TIMEOUT=3)
    assert cluster.wait() == {"scheduler": 20, "worker-0": 20, "worker-b": 20, "worker-2": 20}
    for node in (scheduler, *workers):
        assert "2 workers missing, registered: worker:0, worker:2, worker:b" in node.text(), node.tail()
        assert "Traceback" not in node.text()


def test_worker_without_scheduler_names_the_address(cluster: Cluster) -> None:
    worker = cluster.worker(0, MS_TOPO_TIMEOUT=0.5)
    assert worker.wait() == 22
    assert f"127.0.0.1:{cluster.port}" in worker.text() and "Traceback" not in worker.text()


def test_waiting_worker_logs_missing_nodes(cluster: Cluster) -> None:
    """The default timeout is half an hour, so the log must say what is missing."""
    worker = cluster.worker(0)
    worker.wait_for(f"127.0.0.1:{cluster.port}")
    assert worker.alive


def test_node_without_heartbeat_is_dead_after_node_timeout(cluster: Cluster) -> None:
    cluster.workers = 3
    scheduler, (silent, *others) = cluster.formed(**QUICK, MS_NODE_TIMEOUT=2)
    silent.stop()
    for node in (scheduler, *others):
        assert node.wait() == 30
        assert "worker:0" in node.text() and "MS_NODE_TIMEOUT is 2 s" in node.text()
    silent.resume()
    assert silent.wait() in (21, 30)
    assert "no heartbeat for" in silent.text(), "the reason must be the missed heartbeats, not a lost scheduler"


def test_short_node_timeout_does_not_kill_healthy_node(cluster: Cluster) -> None:
    """Heartbeats are 3 to 5 s apart by default: a lower limit is refused, or reduces the interval."""
    cluster.workers = 1
    cluster.env["MS_NODE_TIMEOUT"] = 2
    scheduler, worker = cluster.scheduler(), cluster.worker(0)
    until(lambda: not scheduler.alive or "rank=0" in worker.text(), "the cluster to form, or to be refused")
    if scheduler.alive:
        started_at = cluster.view().now
        cluster.until(lambda v: v.now > started_at + 6, "three times the limit to pass")
        cluster.release()
        assert set(cluster.wait().values()) == {0}
    else:
        assert scheduler.wait() == 10
        assert "MS_NODE_TIMEOUT=2" in scheduler.text() and "MS_RETRY_INTERVAL_UPPER" in scheduler.text()


def test_node_reconnects_to_scheduler_that_never_replies(cluster: Cluster) -> None:
    with fake_scheduler(cluster.port) as fake:
        worker = cluster.worker(0, MS_RECEIVE_MSG_TIMEOUT=0.3, MS_TOPO_TIMEOUT=6)
        until(lambda: fake.connection_count() >= 3, "three calls", details=worker.tail)
        calls = fake.received(Register)
        assert {(call.node_id, call.instance_id) for call in calls} == {("0", calls[0].instance_id)}
        assert worker.wait() == 22
        assert "MS_RECEIVE_MSG_TIMEOUT" in worker.text()


def member(message: Message) -> list[Message]:
    """Reply like a scheduler to the only worker of its cluster."""
    if isinstance(message, Register):
        formed = RankAssigned(generation=1, rank=0, world=1, local_rank=0, local_world=1)
        return [Registered("fake", message.node_id, 1), formed]
    return []


def test_heartbeat_interval_is_between_retry_limits(cluster: Cluster) -> None:
    with fake_scheduler(cluster.port, member) as fake:
        quick = cluster.worker("quick", MS_RETRY_INTERVAL_LOWER=0.05, MS_RETRY_INTERVAL_UPPER=0.1)
        rare = cluster.worker("rare", MS_RETRY_INTERVAL_LOWER=600, MS_RETRY_INTERVAL_UPPER=900)
        ranks(quick, rare)
        until(lambda: len(fake.received(Heartbeat, "quick")) >= 40, "forty beats", details=cluster.tails)
        assert fake.received(Heartbeat, "rare") == []


def test_connection_attempts_are_at_most_the_upper_interval_apart(cluster: Cluster) -> None:
    cluster.worker(0, MS_RETRY_INTERVAL_LOWER=0.05, MS_RETRY_INTERVAL_UPPER=0.05)
    accept_and_close(cluster.port, 40)  # with the default of 5 s this would take minutes


def test_disabled_heartbeats_detect_exit_but_not_silence(cluster: Cluster) -> None:
    cluster.env |= QUICK
    scheduler, (held, other) = cluster.formed(MS_DISABLE_HEARTBEAT=1, MS_NODE_TIMEOUT=0.5)
    held.stop()
    stopped = cluster.view().now
    view = cluster.until(lambda v: v.now > stopped + 2.5, "five times the limit to pass")
    assert view.phase is Phase.READY and nodes_of(view)["0"].alive
    held.resume()
    held.kill()
    assert (scheduler.wait(), other.wait()) == (30, 30)
    assert "worker:0" in other.text()


def test_worker_stopped_by_debugger_continues_without_heartbeats(cluster: Cluster) -> None:
    _, (held, _) = cluster.formed(**QUICK, MS_DISABLE_HEARTBEAT=1, MS_NODE_TIMEOUT=0.5)
    held.stop()
    stopped = cluster.view().now
    cluster.until(lambda v: v.now > stopped + 1.5, "three times the limit to pass")
    held.resume()
    cluster.release()
    assert set(cluster.wait().values()) == {0}


# -- logs ------------------------------------------------------------------------------------------------------------


def test_lccl_setting_is_accepted_with_a_note(cluster: Cluster) -> None:
    cluster.workers = 1
    _, (worker,) = cluster.formed(MS_ENABLE_LCCL=1)
    cluster.release()
    assert set(cluster.wait().values()) == {0}
    assert "MS_ENABLE_LCCL=1 has no effect" in worker.text()


@pytest.mark.parametrize(
    ("level", "output", "unsaid"), [("0", "joined", "Traceback"), ("1", "formed", "joined"), ("2", "", "formed")]
)
def test_glog_v_sets_log_level(cluster: Cluster, level: str, output: str, unsaid: str) -> None:
    scheduler, _ = cluster.formed(GLOG_v=level)
    cluster.release()
    assert set(cluster.wait().values()) == {0}
    assert output in scheduler.text() and unsaid not in scheduler.text()


def test_glog_log_dir_has_one_directory_per_node(cluster: Cluster) -> None:
    """Also if two roles use one id, and if nodes have no id."""
    logs = cluster.folder / "logs"
    cluster.workers = 3
    cluster.env |= {"GLOG_logtostderr": 0, "GLOG_log_dir": str(logs), "GLOG_v": 0, "MS_SERVER_NUM": 1}
    scheduler = cluster.scheduler(MS_NODE_ID="sched")
    workers = [cluster.worker(0), cluster.worker(), cluster.worker()]
    server = cluster.node("MS_SERVER", 0)
    ranks(*workers)
    cluster.release()
    assert set(cluster.wait().values()) == {0}
    assert scheduler.text() == "" and server.text() == ""
    assert "formed" in (logs / "sched" / "covey.log").read_text()
    assert len(list(logs.glob("*/covey.log"))) == 5, sorted(logs.rglob("*"))


def test_unusable_log_directory_is_a_one_line_error(cluster: Cluster) -> None:
    cluster.env |= {"GLOG_logtostderr": 0, "GLOG_log_dir": str(cluster.default)}
    for node in (cluster.scheduler(), cluster.worker(0)):
        assert node.wait() in (10, 41), node.tail()
        assert str(cluster.default) in node.text() and "Traceback" not in node.text()


# -- errors ----------------------------------------------------------------------------------------------------------

BAD = [
    ("MS_ROLE", "MS_BOSS"),
    ("MS_SCHED_HOST", "999.1.1.1"),
    ("MS_SCHED_HOST", "127.0.0.1:8118"),
    ("MS_SCHED_HOST", "no such host"),
    ("MS_SCHED_PORT", "abc"),
    ("MS_SCHED_PORT", "70000"),
    ("MS_SCHED_PORT", "80"),
    ("MS_WORKER_NUM", "0"),
    ("MS_WORKER_NUM", "-1"),
    ("MS_WORKER_NUM", "two"),
    ("MS_SERVER_NUM", "-1"),
    ("MS_NODE_ID", "a/b"),
    ("MS_WORKER_IP", "localhost"),
    ("MS_ENABLE_RECOVERY", "yes"),
    ("MS_TOPO_TIMEOUT", "soon"),
    ("MS_NODE_TIMEOUT", "0"),
    ("MS_RECEIVE_MSG_TIMEOUT", "-1"),
    ("MS_RETRY_INTERVAL_LOWER", "nan"),
    ("MS_RETRY_INTERVAL_UPPER", "1"),
    ("MS_DISABLE_HEARTBEAT", "2"),
    ("MS_SCHED_MANAGE_PORT", "-1"),
    ("GLOG_v", "9"),
    ("GLOG_logtostderr", "stderr"),
]


@pytest.mark.parametrize(("variable", "value"), BAD)
def test_invalid_variable_is_a_one_line_error_naming_it(cluster: Cluster, variable: str, value: str) -> None:
    for node in (cluster.scheduler(**{variable: value}), cluster.worker(**{variable: value})):
        assert node.wait() == 10, node.tail()
        assert f"{variable}={value}" in node.text()
        assert len(node.text().splitlines()) == 1


@pytest.mark.parametrize("variable", ["MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM", "MS_ROLE"])
def test_missing_variable_is_a_one_line_error_naming_it(cluster: Cluster, variable: str) -> None:
    for node in (cluster.scheduler(**{variable: None}), cluster.worker(**{variable: None})):
        assert node.wait() == 10, node.tail()
        assert f"{variable} is not set" in node.text()
        assert len(node.text().splitlines()) == 1


def test_recovery_without_path_is_a_one_line_error(cluster: Cluster) -> None:
    scheduler = cluster.scheduler(MS_ENABLE_RECOVERY=1)
    assert scheduler.wait() == 10
    assert "MS_RECOVERY_PATH is not set" in scheduler.text()


def test_scheduler_with_unresolvable_host_exits_with_reason(cluster: Cluster) -> None:
    scheduler = cluster.scheduler(MS_SCHED_HOST="unknown.invalid")
    assert scheduler.wait() == 10
    assert "MS_SCHED_HOST=unknown.invalid" in scheduler.text() and "Traceback" not in scheduler.text()


def test_scheduler_at_address_of_another_host_exits_with_reason(cluster: Cluster) -> None:
    scheduler = cluster.scheduler(MS_SCHED_HOST="192.0.2.1")
    assert scheduler.wait() == 10
    assert "MS_SCHED_HOST=192.0.2.1 is not an address of this host" in scheduler.text()


# -- without a cluster -----------------------------------------------------------------------------------------------


def program(cluster: Cluster, text: str, **env: str) -> Process:
    """A program that ends by itself."""
    return cluster.run([sys.executable, cluster.script(text)], name="program", env=env)


def test_init_without_variables_is_a_world_of_one(cluster: Cluster) -> None:
    alone = program(
        cluster,
        "import covey, numpy\n"
        "covey.init()\n"
        "covey.init()\n"
        "print(covey.get_rank(), covey.get_group_size(), covey.get_local_rank(), covey.get_local_rank_size())\n"
        "print(covey.all_reduce(numpy.ones(2)), covey.broadcast(numpy.ones(1)), covey.all_gather(numpy.ones(1)))\n"
        "covey.barrier()\n",
    )
    assert alone.code == 0, alone.tail()
    assert alone.text().splitlines() == ["0 1 0 1", "[1. 1.] [1.] [array([1.])]"]


def test_incomplete_variables_are_an_error(cluster: Cluster) -> None:
    """Four processes that each form a world of one would all look like a success."""
    half = program(cluster, "import covey\ncovey.init()\n", MS_WORKER_NUM="4", MS_SCHED_PORT="8118")
    assert half.code == 10, half.tail()
    assert "MS_ROLE" in half.text()


@pytest.mark.parametrize("call", ["get_rank", "get_group_size", "get_local_rank", "get_local_rank_size", "barrier"])
def test_calls_before_init_raise_an_error_naming_init(cluster: Cluster, call: str) -> None:
    early = program(cluster, SAID.format(call=f"{call}()"))
    assert early.text() == "call covey.init() first: this process has no rank yet\n"


def test_set_seed_seeds_python_numpy_and_torch(cluster: Cluster) -> None:
    seeded = program(
        cluster,
        "import random, numpy, torch, covey\n"
        "for seed in (7, 7, 8):\n"
        "    covey.set_seed(seed)\n"
        "    print(random.random(), numpy.random.rand(), torch.rand(1).item())\n",
    )
    first, again, other = (line.split() for line in seeded.text().splitlines())
    assert first == again
    assert not set(first) & set(other)


@pytest.mark.parametrize("seed", ["-1", "True", "1.0", "2**32"])
def test_invalid_seed_is_refused(cluster: Cluster, seed: str) -> None:
    bad = program(
        cluster, f"import covey\ntry:\n    covey.set_seed({seed})\nexcept covey.CoveyError as error:\n    print(error)\n"
    )
    assert "is invalid: expected an integer from 0" in bad.text()


def test_sigint_ends_worker_that_waits_for_formation(cluster: Cluster) -> None:
    cluster.scheduler(GLOG_v=0).wait_for("scheduler of cluster")
    worker = cluster.worker(0)
    cluster.until(lambda v: nodes_of(v), "the worker to be registered")
    worker.signal(signal.SIGINT)
    assert worker.wait() == 130
    cluster.until(lambda v: not nodes_of(v), "the scheduler to see it go")
