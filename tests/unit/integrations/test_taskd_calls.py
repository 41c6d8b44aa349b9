"""TaskD's variables in covey's words, its configs judged, and torchrun's wishes as `covey run` has them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey.core.taskd_variables import TaskdSetting, read_taskd_settings
from covey.core.types import ClusterRecord, Phase
from covey.errors import UsageError
from covey.integrations import taskd
from covey.integrations.taskd.config import find_manager_address
from covey.integrations.taskd.manager_api import settings_from_config
from covey.integrations.taskd.torchrun_patch import UnsupportedByCovey, covey_run_arguments
from covey.log import log
from covey.settings import DEFAULT_STRATEGY, Settings, load_settings
from covey.storage.journal import has_resumable_journal, open_journal

# -- variables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "strategy"),
    [
        ({"PROCESS_RECOVER": "on"}, DEFAULT_STRATEGY),
        ({"PROCESS_RECOVER": "off"}, "exit"),
        ({"ELASTIC_PROCESS_RECOVER_ENABLE": "1"}, DEFAULT_STRATEGY),
        ({"ELASTIC_PROCESS_RECOVER_ENABLE": "0"}, "exit"),
        ({"PROCESS_RECOVER": "on", "ELASTIC_PROCESS_RECOVER_ENABLE": "0"}, "exit"),
        ({"PROCESS_RECOVER": "off", "HIGH_AVAILABILITY": "recover"}, "exit"),
        ({"HIGH_AVAILABILITY": "recover"}, "recover,exit"),
        ({"HIGH_AVAILABILITY": "dump,retry"}, "retry,dump,exit"),
        ({"HIGH_AVAILABILITY": "elastic-training"}, "elastic-training,exit"),
        ({"HIGH_AVAILABILITY": "recover", "ENABLE_RESTART_FAULT_PROCESS": "on"}, "recover-in-place,recover,exit"),
        ({"ENABLE_RESTART_FAULT_PROCESS": "on"}, DEFAULT_STRATEGY),
        ({"ENABLE_RESTART_FAULT_PROCESS": "off"}, "retry,recover,dump,exit"),
        ({"PROCESS_RECOVER": "off", "ENABLE_RESTART_FAULT_PROCESS": "on"}, "exit"),
    ],
)
def test_what_the_switches_ask_for(environ: dict[str, str], strategy: str) -> None:
    loaded = load_settings(environ)
    assert loaded.settings.strategy == strategy
    assert all(f"{name}={value}" in loaded.origins["strategy"] for name, value in environ.items())


def test_nothing_is_asked_for_by_nothing() -> None:
    assert read_taskd_settings({"HIGH_AVAILABILITY": "", "RANK": "0"}, without=(), default=DEFAULT_STRATEGY) == {}


def test_the_job_is_mindx_task_id() -> None:
    assert read_taskd_settings({"MINDX_TASK_ID": "j"}, without=(), default=DEFAULT_STRATEGY) == {
        "job": TaskdSetting("j", "MINDX_TASK_ID")
    }
    assert load_settings({"MINDX_TASK_ID": "j", "COVEY_JOB": "k"}).settings.job == "k"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("PROCESS_RECOVER", "yes", "on or off"),
        ("ELASTIC_PROCESS_RECOVER_ENABLE", "on", "1 or 0"),
        ("ENABLE_RESTART_FAULT_PROCESS", "1", "on or off"),
        ("HIGH_AVAILABILITY", "magic", "recover-in-place"),
        ("TASKD_PROCESS_ENABLE", "1", "on or off"),
        ("COVEY_TASKD_PORT", "80", "1024"),
    ],
)
def test_a_wrong_word_is_refused(name: str, value: str, allowed: str) -> None:
    with pytest.raises(UsageError, match=f"^{name}.*is (not allowed|invalid): .*{allowed}"):
        load_settings({name: value})


def test_coveys_own_variable_mends_a_wrong_one() -> None:
    assert load_settings({"PROCESS_RECOVER": "yes", "COVEY_STRATEGY": "dump"}).settings.strategy == "dump,exit"


# -- where -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "environ", "endpoint", "name"),
    [
        ({}, {}, "", "127.0.0.1:9601"),
        ({}, {}, "localhost", "127.0.0.1:9601"),
        ({}, {"POD_IP": "10.0.0.7"}, "localhost", "10.0.0.7:9601"),
        ({}, {"POD_IP": "10.0.0.7", "MASTER_ADDR": "10.0.0.1"}, "", "10.0.0.1:9601"),
        ({}, {"MASTER_ADDR": "10.0.0.1"}, "node1", "node1:9601"),
        ({}, {"MASTER_ADDR": "fd00::1"}, "", "[fd00::1]:9601"),
        ({"taskd_port": 9700}, {}, "", "127.0.0.1:9700"),
        ({"sched_host": "10.0.0.2", "sched_port": 8118}, {"MASTER_ADDR": "10.0.0.1"}, "node1", "10.0.0.2:8118"),
        ({"sched_host": "10.0.0.2:7000,10.0.0.3", "sched_port": 8118}, {}, "", "10.0.0.2:7000"),
        ({"sched_host": "10.0.0.2"}, {"MASTER_ADDR": "10.0.0.1"}, "", "10.0.0.1:9601"),
    ],
)
def test_where_the_manager_is(settings: dict[str, Any], environ: dict[str, str], endpoint: str, name: str) -> None:
    assert find_manager_address(Settings(**settings), environ, endpoint).host_port == name


# -- calls -----------------------------------------------------------------------------------------------------------

JOB: dict[str, Any] = {"job_id": "j", "node_nums": 2, "proc_per_node": 4}


@pytest.fixture
def sentences(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was logged, in an environment without a word on any setting."""
    for name in ("MINDX_TASK_ID", "COVEY_STRATEGY", "PROCESS_RECOVER", "TASKD_PROCESS_ENABLE", "MASTER_ADDR", "POD_IP"):
        monkeypatch.delenv(name, raising=False)
    found: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(listener)
    level = log.level
    log.setLevel(logging.INFO)
    yield found
    log.setLevel(level)
    log.removeHandler(listener)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (None, "give a dict"),
        ([], "give a dict"),
        ({}, "no job_id, node_nums, proc_per_node"),
        (JOB | {"job_id": None}, "set MINDX_TASK_ID"),
        (JOB | {"job_id": ""}, "no job_id"),
        (JOB | {"job_id": 7}, "a text is"),
        (JOB | {"job_id": "a/b"}, 'without "/"'),
        (JOB | {"node_nums": 0}, "from 1 to"),
        (JOB | {"node_nums": True}, "from 1 to"),
        (JOB | {"proc_per_node": "4"}, "from 1 to"),
        (JOB | {"node_nums": 1_000_000}, "at most 1000000"),
        (JOB | {"nodes": 1}, "the key nodes, which is not known"),
        (JOB | {"fault_recover": "yes"}, '"on" or "off" is'),
        (JOB | {"taskd_enable": "off"}, "taskd_enable is off"),
        (JOB | {"cluster_infos": [{"ip": 1}]}, "of the texts ip, port, name and role"),
    ],
)
def test_a_wrong_config_is_false_and_a_sentence(config: Any, sentence: str, sentences: list[str]) -> None:
    assert taskd.init_taskd_manager(config) is False
    assert len(sentences) == 1 and sentence in sentences[0]
    assert taskd.start_taskd_manager() is False
    assert "call init_taskd_manager first" in sentences[1]


def test_switched_off_by_the_environment(sentences: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKD_PROCESS_ENABLE", "off")
    assert taskd.init_taskd_manager(JOB) is False
    assert "TASKD_PROCESS_ENABLE=off" in sentences[0]


def test_a_config_becomes_settings(sentences: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"plugin_dir": "p", "cluster_infos": {"ip": "10.0.0.1", "port": "8899", "name": "c", "role": "ClusterD"}}
    assert taskd.init_taskd_manager(JOB | more) is True
    found = settings_from_config(JOB)
    assert (found.settings.worker_num, found.settings.job, found.settings.strategy) == (8, "j", DEFAULT_STRATEGY)
    assert found.origins["worker_num"] == "init_taskd_manager"
    assert settings_from_config(JOB | {"fault_recover": "off"}).settings.strategy == "exit"
    monkeypatch.setenv("PROCESS_RECOVER", "on")
    assert (
        settings_from_config(JOB | {"fault_recover": "off"}).settings.strategy == DEFAULT_STRATEGY
    )  # as with TaskD, the variable is the stronger
    assert sum("without effect" in sentence for sentence in sentences) == 2


def test_the_other_parts(sentences: list[str]) -> None:
    assert [taskd.init_taskd_worker(rank) for rank in ("1", -1, True)] == [False] * 3  # type: ignore[arg-type]
    assert taskd.init_taskd_worker(1, -5) is False
    assert taskd.init_taskd_worker(1, framework="tf") is False
    assert taskd.start_taskd_worker() is False and taskd.destroy_taskd_worker() is False
    assert taskd.init_taskd_worker(1, 5000, "pt") is True and taskd.destroy_taskd_worker() is True

    assert taskd.init_taskd_proxy({"UpstreamAddr": 1}) is False
    assert taskd.destroy_taskd_proxy() is False
    assert taskd.init_taskd_proxy({"UpstreamAddr": "127.0.0.1", "ListenPort": "9602"}) is True
    assert taskd.destroy_taskd_proxy() is True

    assert taskd.register_func("MONITOR", print) is False
    assert taskd.start_taskd_agent() is None
    assert taskd.init_taskd_agent({"Framework": "PyTorch"}) is False
    agent = SimpleNamespace(run=lambda: "ran")
    assert taskd.init_taskd_agent({"Framework": "PyTorch", "UpstreamPort": "9602"}, agent) is True
    assert taskd.register_func("MONITOR", None) is False  # type: ignore[arg-type]
    assert taskd.register_func("MAGIC", print) is False
    assert taskd.register_func("MONITOR", print) is True
    assert taskd.start_taskd_agent() == "ran"
    assert len(sentences) == 14, sentences


def test_whose_journal_can_be_taken_up(tmp_path: Path) -> None:
    def written(phase: Phase, job: str = "j") -> Path:
        folder = tmp_path / f"{phase}-{job}"
        journal = open_journal(folder, job=job, worker_num=1, server_num=0)
        journal.commit([ClusterRecord("c", job, 1, 0, phase, 1)])
        journal.close()
        return folder

    assert has_resumable_journal(written(Phase.READY), "j")
    assert not has_resumable_journal(written(Phase.ENDED), "j")
    assert not has_resumable_journal(written(Phase.READY, "k"), "j")
    assert not has_resumable_journal(tmp_path, "j")
    (tmp_path / "scheduler.journal").write_text("no database at all")
    assert not has_resumable_journal(tmp_path, "j")


# -- torchrun --------------------------------------------------------------------------------------------------------


def asked(**more: Any) -> SimpleNamespace:
    """torchrun's LaunchConfig, as far as it is read."""
    specs = SimpleNamespace(root_log_dir="/tmp/torchelastic_x1", _tee=0, _redirects=0, _local_ranks_filter=None)
    wishes = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": 3,
        "logs_specs": specs,
        "run_id": "none",
        "role": "default",
        "rdzv_endpoint": "localhost:0",
        "rdzv_backend": "c10d",
        "rdzv_configs": {},
        "max_restarts": 0,
        "local_addr": None,
        "shutdown_timeout": 30,
        "numa_options": None,
    }
    return SimpleNamespace(**{**wishes, **more})


PYTHON: tuple[str, list[str]] = (sys.executable, ["-u", "train.py", "--lr", "1"])


def test_torchruns_wishes_are_covey_runs() -> None:
    assert " ".join(covey_run_arguments(asked(), *PYTHON, {})) == (
        "--nproc-per-node 3 --nnodes 1 --master 127.0.0.1:9601 --or-join taskd_log --max-restarts 32767 --role default"
        " --no-live --grace 30 --log-dir taskd_log --tail_worker_log -1 train.py --lr 1"
    )


@pytest.mark.parametrize(
    ("config", "environ", "words"),
    [
        ({"max_restarts": 3}, {}, "--max-restarts 3"),
        ({"rdzv_endpoint": "node1:29500"}, {}, "--master node1:9601"),
        ({"rdzv_endpoint": "[fd00::1]:29500"}, {}, "--master [fd00::1]:9601"),
        ({"rdzv_endpoint": "127.0.0.1:29500"}, {"MASTER_ADDR": "10.0.0.1"}, "--master 10.0.0.1:9601"),
        ({"min_nodes": 2, "max_nodes": 4}, {}, "--nnodes 2:4 "),
        ({"min_nodes": 2, "max_nodes": 2}, {}, "--nnodes 2 "),
        ({"max_nodes": 2, "rdzv_backend": "static", "rdzv_configs": {"rank": 1}}, {}, "--node-rank 1"),
        ({"numa_options": SimpleNamespace(affinity_mode=SimpleNamespace(value="node"))}, {}, "--numa-binding node"),
        ({}, {"COVEY_JOB": "c", "MINDX_TASK_ID": "j"}, "--or-join taskd_log/j"),
        ({}, {"COVEY_JOB": "c", "MINDX_TASK_ID": "j"}, "--rdzv-id j"),
        ({"local_addr": "10.0.0.3"}, {}, "--local-addr 10.0.0.3"),
        ({}, {"TASKD_LOG_PATH": "/logs"}, "--log-dir /logs"),
        ({}, {"TASKD_LOG_PATH": "/logs", "MINDX_TASK_ID": "j"}, "--or-join /logs/j"),
        ({}, {"MS_RECOVERY_PATH": "/kept", "MINDX_TASK_ID": "j"}, "--or-join /kept"),
    ],
)
def test_each_wish(config: dict[str, Any], environ: dict[str, str], words: str) -> None:
    assert words in " ".join(covey_run_arguments(asked(**config), *PYTHON, environ))


def test_the_jobs_name_is_the_managers_and_not_torchruns_id() -> None:
    scheduler = {"MS_SCHED_HOST": "10.0.0.1", "MS_SCHED_PORT": "8118"}  # which has COVEY_JOB, as all of a MSJob
    for environ in ({}, {"MINDX_TASK_ID": "j"}, {"COVEY_JOB": "c"}, {"MINDX_TASK_ID": "j", "COVEY_JOB": "c"} | scheduler):
        assert "--rdzv-id" not in covey_run_arguments(asked(run_id="r7"), *PYTHON, environ)


def test_output_goes_where_torchrun_was_told() -> None:
    specs = SimpleNamespace(root_log_dir="/logs", _tee={0: 3, 1: 1}, _redirects=2, _local_ranks_filter={1, 0})
    words = " ".join(covey_run_arguments(asked(logs_specs=specs), *PYTHON, {}))
    assert "--log-dir /logs --tee 0:3,1:1 --redirects 2 --local-ranks-filter 0,1 train.py" in words


def run_script_path() -> None:
    """Named as torch's own entry of --run-path."""


@pytest.mark.parametrize(
    ("entrypoint", "args", "words"),
    [
        (sys.executable, ["-u", "-m", "package.train", "-x"], ["-m", "package.train", "-x"]),
        ("./train.sh", ["-x"], ["--no-python", "./train.sh", "-x"]),
        ("/other/python", ["-u", "train.py"], ["--no-python", "/other/python", "-u", "train.py"]),
        (run_script_path, ["train.py", "-x"], ["train.py", "-x"]),
    ],
)
def test_what_runs(entrypoint: Any, args: list[str], words: list[str]) -> None:
    assert covey_run_arguments(asked(), entrypoint, args, {})[-len(words) :] == words


@pytest.mark.parametrize(
    ("config", "entrypoint", "args", "sentence"),
    [
        ({}, print, [], "a function"),
        ({}, sys.executable, ["-u", "t.py", "--local-rank=${local_rank}"], "LOCAL_RANK"),
        ({"virtual_local_rank": True}, *PYTHON, "no virtual_local_rank"),
    ],
)
def test_what_covey_does_not_have_stays_torchruns(config: Any, entrypoint: Any, args: list[str], sentence: str) -> None:
    with pytest.raises(UnsupportedByCovey, match=sentence):
        covey_run_arguments(asked(**config), entrypoint, args, {})
