"""Command line of `covey run`: parsing, plan, error messages, Slurm, help and --dry-run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from covey.agent.worker_environment import drop_cluster_variables
from covey.cli.run import slurm
from covey.cli.run.command import variables_from_options
from covey.cli.run.options import OPTION_BY_NAME, OPTIONS, RunPlan, describe_plan, help_text, parse_command_line
from covey.cli.run.plan import RunOptions
from covey.errors import ExitCode, UsageError
from covey.settings import TABLE


def plan(line: str, environ: Mapping[str, str] | None = None, *, cpus: int = 4, gpus: int = 0) -> RunPlan:
    return parse_command_line(shlex.split(line), environ or {}, cpu_count=cpus, gpu_count=gpus)


def refusal(line: str, environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        plan(line, environ)
    assert caught.value.exit_code is ExitCode.BAD_SETTING
    assert str(caught.value).endswith(".")
    return str(caught.value)


# -- sizes and hosts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "world", "local", "nnodes", "node_rank"),
    [
        ("t.py", 1, 1, 1, 0),
        ("-n 8 t.py", 8, 8, 1, 0),
        ("-n8 t.py", 8, 8, 1, 0),
        ("-n=8 t.py", 8, 8, 1, 0),
        ("--worker_num 4 t.py", 4, 4, 1, 0),
        ("--worker-num=4 t.py", 4, 4, 1, 0),
        ("--worker_num=8 --local_worker_num=8 t.py", 8, 8, 1, 0),
        ("-n 8 --worker_num 8 t.py", 8, 8, 1, 0),
        ("-n 4 -n 8 t.py", 8, 8, 1, 0),
        ("--local 4 t.py", 4, 4, 1, 0),
        ("--nproc-per-node 4 t.py", 4, 4, 1, 0),
        ("--nproc_per_node=auto t.py", 4, 4, 1, 0),
        ("--nproc-per-node cpu t.py", 4, 4, 1, 0),
        ("--standalone --nproc-per-node 2 --nnodes 1 t.py", 2, 2, 1, 0),
        ("-n 8 --nproc-per-node 8 t.py", 8, 8, 1, 0),
        ("-n 8 --local 4 --master a:2000 t.py", 8, 4, 2, -1),
        ("-n 8 --local 4 --master a:2000 --node-rank 1 t.py", 8, 4, 2, 1),
        ("-n 8 --local 4 --master a:2000 --node_rank -1 t.py", 8, 4, 2, -1),
        ("-n 8 --local 5 --master a:2000 t.py", 8, 5, 0, -1),
        ("-n 8 --local 5 --nnodes 2 --master a:2000 t.py", 8, 5, 2, -1),
        ("-n 8 --nnodes 2 --master a:2000 t.py", 8, 4, 2, -1),
        ("-n 8 --nproc-per-node 4 --master a:2000 t.py", 8, 4, 2, -1),
        ("--nproc-per-node 4 --local 4 --nnodes 3 --master a:2000 t.py", 12, 4, 3, -1),
        ("--nnodes 2 --master a:2000 --node-rank 0 t.py", 2, 1, 2, 0),
        ("--nnodes 2:4 --nproc-per-node 4 --rdzv-endpoint a:2000 t.py", 8, 4, 2, -1),
    ],
)
def test_plan_has_world_local_workers_hosts_and_node_rank(
    line: str, world: int, local: int, nnodes: int, node_rank: int
) -> None:
    made = plan(line)
    assert (made.world, made.local_workers, made.nnodes, made.node_rank) == (world, local, nnodes, node_rank)


def test_nproc_per_node_counts_gpus_or_cpus() -> None:
    assert plan("--nproc-per-node gpu t.py", gpus=3).world == 3
    assert plan("--nproc-per-node auto t.py", gpus=3).world == 3
    assert plan("--nproc-per-node cpu t.py", gpus=3).world == 4
    assert "this host has none" in refusal("--nproc-per-node gpu t.py")


@pytest.mark.parametrize(
    ("line", "first_rank"),
    [
        ("-n 8 t.py", 0),
        ("-n 8 --local 4 --master a:2000 --node-rank 1 t.py", 4),
        ("-n 8 --local 4 --master a:2000 t.py", -1),
    ],
)
def test_first_rank_is_known_if_node_rank_is(line: str, first_rank: int) -> None:
    assert plan(line).first_rank == first_rank


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-n 8 --nproc-per-node 3 --nnodes 2 t.py", "-n 8 contradicts --nproc-per-node 3 on 2 hosts, which makes 6"),
        ("-n 8 --nproc-per-node 3 t.py", "-n 8 contradicts --nproc-per-node 3, which makes 6"),
        ("-n 8 --local 4 --nnodes 1 t.py", "-n 8 contradicts --local 4 on 1 host, which makes 4"),
        ("-n 8 --local 7 --nnodes 3 --master a t.py", "every host needs at least one worker"),
        ("-n 4 --local 5 t.py", "--local 5 exceeds the number of workers in the cluster: -n 4"),
        ("--local 3 --nproc-per-node 4 t.py", "--local 3 contradicts --nproc-per-node 4"),
        ("-n 8 --worker_num 4 t.py", "-n 8 contradicts --worker_num 4"),
        ("-n 8 --nnodes 3 --master a t.py", "cannot be divided evenly among 3 hosts"),
        ("-n 8 --local 4 t.py", "give --master HOST:PORT"),
        ("--nnodes 2 t.py", "give --master HOST:PORT"),
        ("--node-rank 2 --nnodes 2 --master a t.py", "--node-rank 2 is out of range: expected 0 to 1"),
        ("--node_rank 1 t.py", "--node_rank 1 is out of range: expected 0 to 0"),
        ("-n 8 --local 5 --master a --node-rank 0 t.py", "--node-rank 0 needs the same number of workers on every host"),
        ("--standalone -n 8 --local 4 t.py", "--local 4 on 1 host"),
        ("--standalone --nnodes 2 t.py", "--standalone uses only this host"),
        ("--master a:2000 --master-port 3000 t.py", "--master 2000 contradicts --master-port 3000"),
        ("--master-addr a --rdzv-endpoint b:3000 t.py", "--master-addr a contradicts --rdzv-endpoint b"),
        ("-n 5000 t.py", "too many"),
        ("--nnodes 1000000 --nproc-per-node 1000 --master a t.py", "too many"),
        ("--module --no-python t", "-m contradicts --no-python"),
        ("--start fork --no-python ./t", "--start fork contradicts"),
        ("--start exec --preload torch t.py", "--preload torch contradicts"),
        ("--tee 4:3 -n 4 t.py", "--tee 4:3 names 4, which is out of range: expected 0 to 3"),
        ("--tail_worker_log 0,9 -n 4 t.py", "names 9, which is out of range: expected 0 to 3"),
        ("--local-ranks-filter 4 -n 4 t.py", "names 4, which is out of range: expected 0 to 3"),
        ('--bind_core {"device4":["0"]} -n 4 t.py', "which is out of range: expected 0 to 3"),
    ],
)
def test_contradicting_options_are_refused(line: str, words: str) -> None:
    assert words in refusal(line.replace('"', '\\"'))


# -- scheduler address -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "host", "port"),
    [
        ("t.py", "127.0.0.1", 0),
        ("--master node1:8118 t.py", "node1", 8118),
        ("--master node1 t.py", "node1", 0),
        ("--master [fe80::1%eth0]:8118 t.py", "fe80::1%eth0", 8118),
        ("--master [::1] t.py", "::1", 0),
        ("--master node1:8118,[::1]:8119 t.py", "node1:8118,[::1]:8119", 8118),
        ("--master-addr ::1 --master-port 2000 t.py", "::1", 2000),
        ("--master_addr=10.0.0.1 --master_port=2000 t.py", "10.0.0.1", 2000),
        ("--master_port 2000 t.py", "127.0.0.1", 2000),
        ("--master-port 0 t.py", "127.0.0.1", 0),
        ("--rdzv-endpoint localhost:0 t.py", "localhost", 0),
        ("--rdzv_endpoint=node1:29500 t.py", "node1", 29500),
        ("-n 8 --local 4 --master_addr 10.0.0.1 t.py", "10.0.0.1", 8118),
        ("-n 8 --local 4 --master_port 2000 t.py", "127.0.0.1", 2000),
        ("--standalone --rdzv-endpoint a:2000 t.py", "127.0.0.1", 0),
    ],
)
def test_plan_has_master_host_and_port(line: str, host: str, port: int) -> None:
    made = plan(line)
    assert (made.master_host, made.master_port) == (host, port)


@pytest.mark.parametrize(
    "line",
    [
        "--master a:80 t.py",
        "--master a:b t.py",
        "--master :8118 t.py",
        "--master node1:8118,node2 t.py",
        "--master ::1:8118 t.py",
        "--master [10.0.0.1]:8118 t.py",
        "--master 999.1.1.1:8118 t.py",
        "--rdzv-endpoint a:2000:3000 t.py",
    ],
)
def test_invalid_master_is_refused(line: str) -> None:
    assert "is invalid: expected HOST or HOST:PORT" in refusal(line)


# -- single options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--log_dir out t.py", "log_dir", "out"),
        ("--log-dir=out t.py", "log_dir", "out"),
        ("t.py", "join", True),
        ("--join t.py", "join", True),
        ("--join True t.py", "join", True),
        ("--join=false t.py", "join", False),
        ("t.py", "topo_timeout_s", 1800.0),
        ("--cluster_time_out 60 t.py", "topo_timeout_s", 60.0),
        ("--cluster-time-out -1 t.py", "topo_timeout_s", -1.0),
        ("t.py", "bind_core", False),
        ("--bind_core t.py", "bind_core", True),
        ("--bind-core=True t.py", "bind_core", True),
        (
            """--bind_core '{"device0": ["0-2", "7"], "scheduler": ["3"]}' t.py""",
            "bind_core",
            {"device0": [0, 1, 2, 7], "scheduler": [3]},
        ),
        ("--max-restarts 3 t.py", "max_restarts", 3),
        ("--max_restarts=0 t.py", "max_restarts", 0),
        ("-t 3 -n 2 t.py", "tee", {0: 3, 1: 3}),
        ("-t3 t.py", "tee", {0: 3}),
        ("--tee 1:2,0:1 -n 2 t.py", "tee", {0: 1, 1: 2}),
        ("--tee 0 t.py", "tee", {}),
        ("-r 1 t.py", "redirects", {0: 1}),
        ("--redirects=0:0,1:2 -n 2 t.py", "redirects", {1: 2}),
        ("--tail_worker_log -1 t.py", "tail_ranks", [-1]),
        ("--tail-worker-log=3,1,3 -n 4 t.py", "tail_ranks", [1, 3]),
        ("--local-ranks-filter 1,0 -n 2 t.py", "shown_local_ranks", [0, 1]),
        ("--worker_log_name {hostname}_w t.py", "worker_log_name", "{hostname}_w"),
        ("--start exec t.py", "start", "exec"),
        ("--preload numpy,torch.optim t.py", "preload", ["numpy", "torch.optim"]),
        ("--grace 3 t.py", "grace_s", 3.0),
        ("--shutdown-timeout 3 t.py", "grace_s", 3.0),
        ("--tls config.json t.py", "tls", "config.json"),
        ("t.py", "manage_port", -1),
        ("--manage-port 0 t.py", "manage_port", 0),
        ("--manage-port 11202 t.py", "manage_port", 11202),
        ("--recovery-path r t.py", "recovery_path", "r"),
        ("--rdzv-id j7 t.py", "job", "j7"),
        ("--role trainer t.py", "role_name", "trainer"),
        ("--rank_table_file t.json t.py", "rank_table_file", "t.json"),
        ("--no-live t.py", "live", False),
        ("--dry-run t.py", "dry_run", True),
        ("--dry_run t.py", "dry_run", True),
        ("-h", "help", True),
        ("-n 8 --help", "help", True),
        ("t.py --help", "help", False),
    ],
)
def test_option_sets_plan_field(line: str, field: str, value: object) -> None:
    assert getattr(plan(line), field) == value


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-n 0 t.py", "-n 0 is invalid: expected an integer from 1 to 1000000."),
        ("-n t.py", "-n t.py is invalid: expected an integer from 1 to 1000000."),
        ("--local 0 t.py", "--local 0 leaves this host without processes: give -n and --spares, or more workers."),
        ("--nnodes 4:2 t.py", "--nnodes 4:2 is invalid: expected N, or MIN:MAX with MIN <= MAX."),
        ("--nproc-per-node xpu t.py", "--nproc-per-node xpu is invalid: expected a number of workers, auto, cpu or gpu."),
        ("--master_port 80 t.py", "--master_port 80 is invalid: expected a port from 1024 to 65535."),
        ("--start-method thread t.py", "--start-method thread is invalid: expected spawn, fork or forkserver."),
        ("--start spawn t.py", "--start spawn is invalid: expected fork or exec."),
        ("--join=maybe t.py", "--join maybe is invalid: expected True or False."),
        ("--preload torch.,os t.py", "--preload torch.,os is invalid: expected a list of modules such as numpy,torch.optim."),
        ("--dry-run=1 t.py", "--dry-run=1 is invalid: --dry-run takes no value."),
        ("-mx t.py", "-mx is invalid: -m takes no value."),
        ("--log-dir --join t.py", "--log-dir needs a value: --log-dir DIR."),
        ("--log-dir", "--log-dir needs a value: --log-dir DIR."),
        ("--tls= t.py", "--tls  is invalid: expected a path in UTF-8, not empty and without control characters."),
        ("--or-join= t.py", "--or-join  is invalid: expected a path in UTF-8, not empty and without control characters."),
        ("--recovery-path= t.py", "--recovery-path is empty: give the directory of the journal, or omit the option."),
        (
            "--virtual-local-rank t.py",
            "--virtual-local-rank is not supported: LOCAL_RANK is always the worker's index on its host.",
        ),
        (
            "--nproc-pernode 3 t.py",
            "Unknown option --nproc-pernode: did you mean --nproc-per-node? covey run --help lists all.",
        ),
        ("--nproc 3 t.py", "Unknown option --nproc: did you mean --nproc-per-node? covey run --help lists all."),
        ("--use-env t.py", "Unknown option --use-env: covey run --help lists all."),
        ("--zzz t.py", "Unknown option --zzz: covey run --help lists all."),
        ("-q t.py", "Unknown option -q: covey run --help lists all."),
    ],
)
def test_invalid_option_error_text(line: str, message: str) -> None:
    assert refusal(line) == message


@pytest.mark.parametrize(
    "line",
    [
        "--rdzv-backend etcd t.py",
        "--sim_level 1 t.py",
        "--tee 4 t.py",
        "--tee 0:1:2 t.py",
        "--tail_worker_log a t.py",
        "--tail_worker_log -2 t.py",
        "--worker_log_name a/b t.py",
        "--worker_log_name {rank} t.py",
        "--worker_log_name= t.py",
        """--bind_core '{"cpu0": ["1"]}' t.py""",
        """--bind_core '{"device0": ["3-1"]}' t.py""",
        """--bind_core '{"device0": []}' t.py""",
        """--bind_core '{"device0": [1' t.py""",
        "--max-restarts -1 t.py",
        "--grace -1 t.py",
        "--cluster_time_out 0 t.py",
        "--node-rank -2 t.py",
        "--local-addr node1 t.py",
    ],
)
def test_invalid_value_error_names_option(line: str) -> None:
    flag = shlex.split(line)[0].rstrip("=")
    assert refusal(line).startswith(f"{flag} ") and " is invalid: expected " in refusal(line)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--monitor-interval 1 t.py", "--monitor-interval is accepted without effect"),
        ("--rdzv-backend c10d t.py", "--rdzv-backend is accepted without effect"),
        ("--rdzv_backend=static t.py", "--rdzv_backend is accepted without effect"),
        ("--rdzv-conf timeout=5 t.py", "--cluster_time_out"),
        ("--start-method spawn t.py", "--start fork or exec"),
        ("--sim_rank_id 0 t.py", "covey has no simulation"),
        ("--nnodes 2:4 --node-rank 3 --master a t.py", "--node-rank 3 is ignored because the number of hosts is not fixed"),
        ("--standalone --rdzv-endpoint a:2000 t.py", "the given master is ignored"),
        ("--rank_table_file r.json t.py", "passed to workers as RANK_TABLE_FILE"),
    ],
)
def test_option_without_full_effect_adds_remark(line: str, words: str) -> None:
    (remark,) = plan(line).remarks
    assert words in remark


@pytest.mark.parametrize("line", ["t.py", "--sim_level -1 t.py", "--run-path t.py", "--nnodes 2:2 --master a t.py"])
def test_ordinary_options_add_no_remark(line: str) -> None:
    assert plan(line).remarks == []


# -- command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "command", "module", "python", "start"),
    [
        ("train.py --lr 0.1 -n 3 --help", "train.py --lr 0.1 -n 3 --help", False, True, "fork"),
        ("-n 2 -- train.py -- -x", "train.py -- -x", False, True, "fork"),
        ("-- -odd.py", "-odd.py", False, True, "fork"),
        ("-m package.train -m", "package.train -m", True, True, "fork"),
        ("--module package.train", "package.train", True, True, "fork"),
        ("--no-python ./a.out x", "./a.out x", False, False, "exec"),
        ("--no_python python t.py", "python t.py", False, False, "exec"),
        ("python train.py --lr 1", "train.py --lr 1", False, True, "fork"),
        ("python3 -m pkg x", "pkg x", True, True, "fork"),
        ("python -u train.py", "python -u train.py", False, False, "exec"),
        ("python", "python", False, False, "exec"),
        ("/opt/bin/python train.py", "/opt/bin/python train.py", False, False, "exec"),
        ("pytest -x tests", "pytest -x tests", True, True, "fork"),
        ("--start exec train.py", "train.py", False, True, "exec"),
    ],
)
def test_command_module_and_start_method(line: str, command: str, module: bool, python: bool, start: str) -> None:
    made = plan(line)
    assert (made.command, made.is_module, made.is_python, made.start) == (command.split(), module, python, start)


# -- environment -----------------------------------------------------------------------------------------------------


def test_variables_apply_without_options() -> None:
    environ = {"MS_WORKER_NUM": "8", "MS_SCHED_HOST": "node1", "MS_SCHED_PORT": "8118", "COVEY_GRACE": "2"}
    made = plan("--local 4 t.py", environ | {"MS_TOPO_TIMEOUT": "9", "MS_SCHED_MANAGE_PORT": "0"})
    assert (made.world, made.local_workers, made.master_host, made.master_port) == (8, 4, "node1", 8118)
    assert (made.topo_timeout_s, made.manage_port, made.grace_s) == (9.0, 0, 2.0)
    assert made.loaded.origins["worker_num"] == "MS_WORKER_NUM"


def test_options_override_variables() -> None:
    made = plan("-n 2 --master-port 3000 t.py", {"MS_WORKER_NUM": "8", "MS_SCHED_PORT": "8118"})
    assert (made.world, made.master_port, made.loaded.origins["sched_port"]) == (2, 3000, "--master-port")


def test_nproc_per_node_overrides_worker_num_with_remark() -> None:
    made = plan("--nproc-per-node 2 t.py", {"MS_WORKER_NUM": "8"})
    assert made.world == 2
    assert made.remarks == ["MS_WORKER_NUM=8 is overridden by --nproc-per-node 2."]


def test_torchrun_variables_apply_without_options() -> None:
    """Operators of PyTorch jobs set these in a pod whose command is `torchrun t.py`."""
    environ = {"PET_NNODES": "1:4", "PET_NPROC_PER_NODE": "2", "PET_RDZV_ENDPOINT": "node1:29400", "PET_RDZV_BACKEND": "c10d"}
    environ |= {"PET_MASTER_ADDR": "elsewhere", "PET_MAX_RESTARTS": "3", "PET_STANDALONE": "0", "PET_NODE_RANK": ""}
    made = plan("t.py --lr 1", environ | {"PET_TEE": "3"})
    assert (made.world, made.local_workers, made.master_host, made.master_port) == (2, 2, "node1", 29400)
    assert (made.max_restarts, made.tee, made.command) == (3, {0: 3, 1: 3}, ["t.py", "--lr", "1"])
    assert variables_from_options(made.loaded)["MS_SCHED_HOST"] == "node1"
    made = plan("--nproc-per-node 3 --nnodes 1 --standalone --max-restarts 1 t.py", environ)
    assert (made.world, made.is_single_host, made.max_restarts) == (3, True, 1)
    assert plan("package.train", {"PET_MODULE": "1"}).is_module


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("PET_NPROC_PER_NODE", "two", "a number of workers, auto, cpu or gpu."),
        ("PET_STANDALONE", "yes", "1 (on) or 0 (off)."),
        ("PET_MASTER_PORT", "80", "a port from 1024 to 65535."),
    ],
)
def test_invalid_torchrun_variable_error_names_variable(variable: str, value: str, allowed: str) -> None:
    assert refusal("t.py", {variable: value}).endswith(f" is invalid: expected {allowed}")
    assert variable in refusal("t.py", {variable: value})


def test_invalid_variable_error_names_variable() -> None:
    assert refusal("t.py", {"MS_WORKER_NUM": "none"}).startswith("MS_WORKER_NUM=none is invalid")
    assert "MS_WORKER_NUM=2" in refusal("--local 4 t.py", {"MS_WORKER_NUM": "2"})


def test_enable_recovery_requires_recovery_path() -> None:
    assert "--recovery-path" in refusal("t.py", {"MS_ENABLE_RECOVERY": "1"})
    assert plan("t.py", {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": "r"}).recovery_path == "r"
    assert plan("t.py", {"MS_RECOVERY_PATH": "r"}).recovery_path == ""


# -- Slurm -----------------------------------------------------------------------------------------------------------

STEP = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[05-08]",
    "SLURM_NNODES": "4",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
}


@pytest.mark.parametrize(
    ("line", "changes", "world", "local", "node_rank"),
    [
        ("-n 8 t.py", {}, 8, 4, 1),
        ("--nproc-per-node 3 t.py", {}, 6, 3, 1),
        ("--nproc-per-node 3 --nnodes 2 t.py", {}, 6, 3, 1),
        ("t.py", {}, 2, 1, 1),
        ("t.py", {"SLURM_NTASKS_PER_NODE": "4"}, 8, 4, 1),
        ("-n 2 t.py", {"SLURM_NTASKS_PER_NODE": "4"}, 2, 1, 1),
        ("-n 8 --node-rank 0 t.py", {}, 8, 4, 0),
        ("-n 8 t.py", {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}, 8, 1, 5),
    ],
)
def test_slurm_step_determines_sizes_and_node_rank(
    line: str, changes: dict[str, str], world: int, local: int, node_rank: int
) -> None:
    made = plan(line, STEP | changes)
    assert (made.world, made.local_workers, made.node_rank) == (world, local, node_rank)
    assert (made.master_host, made.master_port) == ("gpu07", 14242)


def test_tasks_of_a_slurm_step_share_a_port_and_steps_do_not() -> None:
    first = plan("-n 4 t.py", STEP | {"SLURM_NODEID": "0"})
    other = plan("-n 4 t.py", STEP)
    later = plan("-n 4 t.py", STEP | {"SLURM_STEP_ID": "1"})
    assert first.master_port == other.master_port != later.master_port
    assert (first.first_rank, other.first_rank) == (0, 2)


def test_master_port_overrides_slurm_port() -> None:
    made = plan("-n 4 --master-port 3000 t.py", STEP)
    assert (made.master_host, made.master_port) == ("gpu07", 3000)


@pytest.mark.parametrize(
    ("line", "host", "world", "local"),
    [
        ("-n 8 --local 4 --master head:2000 t.py", "head", 8, 4),
        ("--standalone -n 3 t.py", "127.0.0.1", 3, 3),
        ("--nnodes 1 -n 3 t.py", "127.0.0.1", 3, 3),
    ],
)
def test_options_override_slurm_step(line: str, host: str, world: int, local: int) -> None:
    made = plan(line, STEP)
    assert (made.master_host, made.world, made.local_workers) == (host, world, local)


def test_several_slurm_tasks_per_host_add_remark() -> None:
    (remark,) = plan("t.py", STEP | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}).remarks
    assert "8 tasks on 2 hosts" in remark


def test_slurm_step_on_one_host_uses_loopback() -> None:
    alone = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "gpu07"}
    made = plan("-n 4 t.py", STEP | alone)
    assert (made.local_workers, made.master_host, made.master_port) == (4, "127.0.0.1", 0)


def test_batch_script_without_srun_uses_one_host_with_remark() -> None:
    batch = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_NODEID": "0"}
    made = plan("-n 4 t.py", batch)
    assert (made.local_workers, made.master_host) == (4, "127.0.0.1")
    assert made.remarks == ["SLURM_NNODES=2, but without srun only this host is used: use srun covey run ... for all hosts."]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID=x is invalid"),
        ({"SLURM_STEP_NUM_NODES": "0"}, "SLURM_STEP_NUM_NODES=0 is invalid"),
        ({"SLURM_NODEID": "2"}, "the host index of the Slurm step, 2, is out of range: expected 0 to 1"),
        ({"SLURM_STEP_NODELIST": "gpu[07-"}, 'Slurm\'s node list "gpu[07-" is invalid'),
        ({"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "Slurm did not set SLURM_STEP_NODELIST"),
    ],
)
def test_invalid_slurm_variables_are_refused(changes: dict[str, str], words: str) -> None:
    assert words in refusal("-n 4 t.py", STEP | changes)


def test_size_that_contradicts_slurm_step_is_refused() -> None:
    assert "-n 4 contradicts --local 4 on 2 hosts (of the Slurm step)" in refusal("-n 4 --local 4 t.py", STEP)


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("a", ["a"]),
        ("a,b-2", ["a", "b-2"]),
        ("node[01-03,7],x", ["node01", "node02", "node03", "node7", "x"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]-ib", ["n098-ib", "n099-ib", "n100-ib", "n101-ib"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
    ],
)
def test_expand_nodelist(nodelist: str, hosts: list[str]) -> None:
    assert slurm.expand_nodelist(nodelist) == hosts


@pytest.mark.parametrize(
    "nodelist", ["", "a[", "a]", "a[1-]", "a[3-1]", "a[x]", "a,,b", "a[]", "a[1-999999999]", "a[1-400][1-400]"]
)
def test_malformed_nodelist_is_refused(nodelist: str) -> None:
    with pytest.raises(UsageError, match="is invalid: expected a list such as"):
        slurm.expand_nodelist(nodelist)


# -- option table, help, --dry-run ------------------------------------------------------------------------------------


def test_every_option_has_an_existing_field() -> None:
    fields = {*RunOptions.__struct_fields__, *TABLE, "master", "help", ""}
    for options in OPTIONS.values():
        for option in options:
            assert option.field in fields, option.names
            assert (option.kind is None) == (not option.metavar or option.field in TABLE), option.names
    assert not set(RunOptions.__struct_fields__) & set(TABLE)


def test_every_field_of_run_options_has_an_option() -> None:
    fields = {option.field for options in OPTIONS.values() for option in options}
    assert set(RunOptions.__struct_fields__) <= fields


def test_option_names_are_unique() -> None:
    names = [name.replace("_", "-") for options in OPTIONS.values() for option in options for name in option.names.split()]
    assert sorted(names) == sorted(OPTION_BY_NAME)


MSRUN = (
    "--worker_num --local_worker_num --master_addr --master_port --node_rank --log_dir --join --cluster_time_out --bind_core "
    "--sim_level --sim_rank_id --rank_table_file --worker_log_name --tail_worker_log"
)
TORCHRUN = (
    "--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --standalone --max-restarts "
    "--monitor-interval --start-method --event-log-handler --role -m --module --no-python --run-path --log-dir -r --redirects "
    "-t --tee --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank --master-addr "
    "--master-port --local-addr --logs-specs --numa-binding --signals-to-handle --shutdown-timeout --virtual-local-rank"
)


@pytest.mark.parametrize("name", [*MSRUN.split(), *TORCHRUN.split()])
def test_every_msrun_and_torchrun_option_is_known(name: str) -> None:
    assert name.replace("_", "-") in OPTION_BY_NAME if name.startswith("--") else name in OPTION_BY_NAME


def test_help_lists_every_option_once() -> None:
    text = help_text()
    for heading, options in OPTIONS.items():
        assert f"\n{heading}:\n" in text
        for option in options:
            shown = f"  {', '.join(option.names.split())} {option.metavar}".rstrip()
            assert sum(line.startswith(f"{shown} ") for line in text.splitlines()) == 1, shown
    assert "covey run -n 8 train.py --lr 0.1" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_dry_run_describes_plan() -> None:
    text = describe_plan(
        plan(
            "-n 8 --local 4 --master [::1]:2000 --node-rank 1 --log-dir out --tls c.json --recovery-path r --preload numpy "
            "--tee 0:1 --bind-core --rdzv-backend c10d train.py 'a b'",
            {"COVEY_SECRET": "mellon"},
        )
    )
    for words in (
        "8 on 2 hosts, 4 on this host (host 1)",
        "[::1]:2000, started on the host with this address",
        "python train.py 'a b'",
        "which also imports numpy",
        "out/scheduler.log, out/worker_<rank>.log",
        "stdout of local rank 0",
        "an equal share",
        "journal      r",
        "TLS          c.json",
        "MS_WORKER_NUM=8 (from -n)",
        "COVEY_SECRET=(set)",
        "RANK=4..7",
        "--rdzv-backend is accepted without effect",
    ):
        assert words in text, words
    assert "mellon" not in text


def test_dry_run_describes_values_chosen_later() -> None:
    text = describe_plan(plan("-n 8 --local 5 --master a --manage-port 0 --cluster_time_out -1 -m pkg"))
    for words in (
        "any number of hosts",
        "a:8118",
        "waits for all nodes without limit",
        "REST port    none",
        "python -m pkg",
        "(assigned by",
    ):
        assert words in text, words
    assert "127.0.0.1:(a free port), started on this host" in describe_plan(plan("t.py"))


# -- random input ----------------------------------------------------------------------------------------------------

WORDS = st.one_of(
    st.sampled_from(sorted(OPTION_BY_NAME)),
    st.sampled_from(["1", "2", "8", "-1", "0", "True", "a:2000", "[::1]:2000", "2:3", "0:1,1:2", "fork", "t.py", "--", "auto"]),
    st.builds("{}={}".format, st.sampled_from(sorted(OPTION_BY_NAME)), st.text(max_size=8)),
    st.text(max_size=12),
)
SLURM = st.dictionaries(st.sampled_from(sorted([*STEP, "SLURM_NTASKS_PER_NODE"])), st.text("0129a[]-,", max_size=6))


@settings(deadline=None)
@example(["-h"], 1, 0, {})
@given(st.lists(WORDS, max_size=8), st.integers(1, 256), st.integers(0, 8), st.one_of(st.just({}), SLURM))
def test_any_command_line_gives_consistent_plan_or_usage_error(
    argv: list[str], cpus: int, gpus: int, environ: dict[str, str]
) -> None:
    try:
        made = parse_command_line(argv, environ, cpu_count=cpus, gpu_count=gpus)
    except UsageError as error:
        assert str(error).endswith(".") and str(error).isprintable()
        return
    assert made.help or made.command
    assert 1 <= made.local_workers <= made.world
    assert made.is_single_host or made.master_port
    assert made.nnodes == 0 or -1 <= made.node_rank < made.nnodes
    assert made.first_rank + made.local_workers <= made.world
    assert describe_plan(made)


@pytest.mark.parametrize("words", ["-n 4", "--"])
def test_missing_script_exits_with_bad_script(words: str) -> None:
    with pytest.raises(UsageError, match="No script is given") as refusal:
        parse_command_line(words.split(), {}, cpu_count=4, gpu_count=0)
    assert refusal.value.exit_code is ExitCode.BAD_SCRIPT


def test_cluster_variables_of_an_enclosing_worker_are_dropped() -> None:
    manual = dict.fromkeys(("MS_ROLE", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM", "COVEY_INCARNATION"), "1")
    inside = {**manual, "COVEY_AGENT": "127.0.0.1:1@/relay", "MS_NODE_TIMEOUT": "5"}
    drop_cluster_variables(inside)
    assert inside == {"MS_NODE_TIMEOUT": "5"}
    drop_cluster_variables(manual)
    assert len(manual) == 5, "without COVEY_AGENT the variables must be kept"
