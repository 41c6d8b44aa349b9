"""Tests of set_fl_context: MindSpore's keys and defaults, allowed values, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import covey
from covey.errors import UsageError
from covey.federated import context

# Every key of MindSpore with its documented default.
DOCUMENTED: dict[str, context.ContextValue] = {
    "enable_fl": False, "server_mode": "FEDERATED_LEARNING", "ms_role": "MS_SERVER", "worker_num": 0, "server_num": 0,
    "scheduler_ip": "0.0.0.0", "scheduler_port": 6667, "fl_server_port": 6668, "scheduler_manage_port": 11202,
    "enable_fl_client": False, "fl_name": "", "start_fl_job_threshold": 1, "start_fl_job_time_window": 3000,
    "update_model_ratio": 1.0, "update_model_time_window": 3000, "global_iteration_time_window": 3_600_000,
    "fl_iteration_num": 20, "client_epoch_num": 25, "client_batch_size": 32, "client_learning_rate": 0.001,
    "worker_step_num_per_iteration": 65, "encrypt_type": "NOT_ENCRYPT", "dp_eps": 50.0, "dp_delta": 0.01, "dp_norm_clip": 1.0,
    "share_secrets_ratio": 1.0, "cipher_time_window": 300_000, "reconstruct_secrets_threshold": 0, "sign_k": 0.01,
    "sign_eps": 100.0, "sign_thr_ratio": 0.6, "sign_global_lr": 1.0, "sign_dim_out": 0, "pki_verify": False,
    "root_first_ca_path": "", "root_second_ca_path": "", "equip_crl_path": "", "replay_attack_time_diff": 600_000,
    "enable_ssl": False, "client_password": "", "server_password": "", "config_file_path": "", "http_url_prefix": "",
    "checkpoint_dir": "", "upload_compress_type": "NO_COMPRESS", "upload_sparse_rate": 0.4,
    "download_compress_type": "NO_COMPRESS",
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(context.CONTEXT_VARIABLE, raising=False)
    covey.reset_fl_context()
    yield
    covey.reset_fl_context()


def test_every_key_has_and_accepts_documented_default() -> None:
    assert {key: covey.get_fl_context(key) for key in DOCUMENTED} == DOCUMENTED
    covey.set_fl_context(**DOCUMENTED)


def test_mindspore_example_call_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("{}")
    covey.set_fl_context(
        enable_fl=True, server_mode="FEDERATED_LEARNING", ms_role="MS_SERVER", server_num=4, scheduler_ip="192.168.216.124",
        scheduler_port=6667, fl_server_port=6668, fl_name="LeNet", scheduler_manage_port=11202,
        config_file_path="./config.json",
    )  # fmt: skip
    assert covey.get_fl_context("server_num") == 4


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("colour", 1, "fl_context has no key colour"),
        ("scheduler_prot", 1, "did you mean scheduler_port?"),
        ("ms_role", "MS_KING", "ms_role must be MS_SERVER"),
        ("scheduler_port", 0, "scheduler_port must be a port"),
        ("scheduler_port", True, "must be an integer, not True"),
        ("start_fl_job_threshold", 0, "must be an integer above 0, not 0"),
        ("update_model_ratio", 1.5, "up to 1, not 1.5"),
        ("update_model_ratio", float("nan"), "update_model_ratio"),
        ("dp_delta", 1.0, "below 1, not 1.0"),
        ("sign_k", 0.3, "up to 0.25"),
        ("scheduler_ip", "a host\n", "scheduler_ip must be a host"),
        ("http_url_prefix", "x", 'starts with "/"'),
        ("http_url_prefix", "/x/", "does not end with it"),
        ("client_epoch_num", 10**30, "client_epoch_num must be at most"),
        ("encrypt_type", "SIGNDS", "not supported yet"),
        ("encrypt_type", "STABLE_PW_ENCRYPT", "not supported yet"),
        ("server_mode", "HYBRID_TRAINING", "not supported yet"),
        ("worker_num", 1, "HYBRID_TRAINING"),
        ("server_num", 129, "up to 128"),
        ("server_num", 0, "server_num must be an integer from 1 to 128, not 0"),
        (
            "config_file_path",
            "./no/config.json",
            "config_file_path=./no/config.json is not a file: give the path of config.json",
        ),
        ("enable_fl_client", True, "covey.federated.Device"),
        ("download_compress_type", "TOP_K", "NO_COMPRESS or QUANT"),
        ("durability", "cloud", "none, process, host, disk"),
    ],
)
def test_invalid_key_or_value_is_named_and_no_key_is_set(key: str, value: object, message: str) -> None:
    with pytest.raises(UsageError) as error:
        covey.set_fl_context(**{"fl_name": "x", key: value})  # type: ignore[arg-type]
    assert message in str(error.value)
    assert covey.get_fl_context("fl_name") == ""


def test_password_is_not_shown_in_error_or_repr() -> None:
    with pytest.raises(UsageError) as error:
        covey.set_fl_context(client_password=12345)
    assert "12345" not in str(error.value)
    covey.set_fl_context(client_password="geheim")
    assert "geheim" not in repr(context._context)


def test_environment_takes_precedence_over_script(monkeypatch: pytest.MonkeyPatch) -> None:
    covey.set_fl_context(server_num=4)
    monkeypatch.setenv(context.CONTEXT_VARIABLE, json.dumps({"server_num": 2}))
    assert covey.get_fl_context("server_num") == 2


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [("enable_ssl", "True", True), ("enable_ssl", "no", False), ("scheduler_port", "7", 7), ("fl_name", "1", "1")],
)
def test_from_text_parses_command_line_value(key: str, text: str, value: object) -> None:
    assert context.from_text(key, text) == value


@pytest.mark.parametrize(
    ("key", "text"), [("enable_ssl", "maybe"), ("scheduler_port", "x"), ("scheduler_port", "0"), ("y", "1")]
)
def test_from_text_refuses_invalid_value(key: str, text: str) -> None:
    with pytest.raises(UsageError, match=key):
        context.from_text(key, text)


def test_misspelled_reconstruct_key_is_accepted() -> None:
    covey.set_fl_context(reconstruct_secrets_threshhold=3)
    assert covey.get_fl_context("reconstruct_secrets_threshold") == 3


@pytest.mark.parametrize(
    ("recovery", "found"),
    [
        (None, None),
        ({"storage_type": 1, "storge_file_path": "config.json"}, "config.json.state"),
        ({"storage_type": 1, "storage_file_path": "deep/"}, "deep"),
    ],
)
def test_recovery_path_is_read_from_config(tmp_path: Path, recovery: object, found: str | None) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({} if recovery is None else {"recovery": recovery}))
    covey.set_fl_context(config_file_path=str(config))
    assert context.find_recovery_path() == (None if found is None else tmp_path / found)


@pytest.mark.parametrize("recovery", [{"storage_type": 2, "storage_file_path": "x"}, {"storage_type": 1}, {}, "x"])
def test_unsupported_recovery_storage_is_refused(tmp_path: Path, recovery: object) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"recovery": recovery}))
    covey.set_fl_context(config_file_path=str(config))
    with pytest.raises(UsageError, match="recovery in"):
        context.find_recovery_path()
