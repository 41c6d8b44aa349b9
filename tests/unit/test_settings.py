"""Settings: parsing of each variable, error messages, layers, required variables, output."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.types import Role
from covey.errors import ExitCode, UsageError
from covey.settings import (
    FIELD_BY_VARIABLE,
    TABLE,
    GivenValue,
    LoadedSettings,
    Settings,
    check_manual_settings,
    load_settings,
    misspelled_variables,
    settings_table,
)

LONG = "n" * 101


def refusal(environ: dict[str, str]) -> str:
    with pytest.raises(UsageError) as caught:
        load_settings(environ)
    assert caught.value.exit_code is ExitCode.BAD_SETTING
    return str(caught.value)


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("MS_ROLE", "MS_SCHED", Role.SCHEDULER),
        ("MS_ROLE", "MS_WORKER", Role.WORKER),
        ("MS_ROLE", "MS_PSERVER", Role.PSERVER),
        ("MS_ROLE", "MS_SERVER", Role.SERVER),
        ("MS_SCHED_HOST", "127.0.0.1", "127.0.0.1"),
        ("MS_SCHED_HOST", "::1", "::1"),
        ("MS_SCHED_HOST", "[2001:db8::7]", "2001:db8::7"),
        ("MS_SCHED_HOST", "fe80::1%eth0", "fe80::1%eth0"),
        ("MS_SCHED_HOST", "node-1.example.org", "node-1.example.org"),
        ("MS_SCHED_HOST", "sched_0.jobs.svc.", "sched_0.jobs.svc."),
        ("MS_SCHED_PORT", "1024", 1024),
        ("MS_SCHED_PORT", " 65535 ", 65535),
        ("MS_NODE_ID", "0", "0"),
        ("MS_NODE_ID", "n" * 100, "n" * 100),
        ("MS_WORKER_NUM", "8", 8),
        ("MS_SERVER_NUM", "0", 0),
        ("MS_SERVER_NUM", "2", 2),
        ("MS_WORKER_IP", "10.0.0.7", "10.0.0.7"),
        ("MS_WORKER_IP", "[fe80::2%eth1]", "fe80::2%eth1"),
        ("MS_ENABLE_RECOVERY", "1", True),
        ("MS_ENABLE_RECOVERY", "0", False),
        ("MS_RECOVERY_PATH", "/var/lib/a job", "/var/lib/a job"),
        ("MS_TOPO_TIMEOUT", "600", 600.0),
        ("MS_TOPO_TIMEOUT", "-1", -1.0),
        ("MS_NODE_TIMEOUT", "0.5", 0.5),
        ("MS_NODE_TIMEOUT", "-1", -1.0),
        ("MS_RECEIVE_MSG_TIMEOUT", ".5", 0.5),
        ("MS_RETRY_INTERVAL_LOWER", "1.25", 1.25),
        ("MS_RETRY_INTERVAL_UPPER", "60", 60.0),
        ("MS_DISABLE_HEARTBEAT", "1", True),
        ("MS_ENABLE_LCCL", "1", True),
        ("MS_ENABLE_LCCL", "2", False),
        ("MS_ENABLE_LCCL", "yes", False),
        ("MS_SCHED_MANAGE_PORT", "0", 0),
        ("MS_SCHED_MANAGE_PORT", "11203", 11203),
        ("GLOG_v", "4", 4),
        ("GLOG_log_dir", "logs", "logs"),
        ("GLOG_logtostderr", "1", True),
        ("COVEY_SECRET", "mellon", "mellon"),
        ("COVEY_SECRET_FILE", "/run/secret", "/run/secret"),
        ("COVEY_TOKEN", "t0ken", "t0ken"),
        ("COVEY_HOST_ID", "rack-3", "rack-3"),
        ("COVEY_GRACE", "0", 0.0),
        ("COVEY_JOB", "mnist", "mnist"),
    ],
)
def test_valid_value_is_parsed_and_origin_recorded(variable: str, text: str, value: object) -> None:
    loaded = load_settings({variable: text})
    field = FIELD_BY_VARIABLE[variable]
    assert getattr(loaded.settings, field) == value
    assert type(getattr(loaded.settings, field)) is type(value)
    assert loaded.origins[field] == variable
    assert [other for other, origin in loaded.origins.items() if origin != "default"] == [field]


@pytest.mark.parametrize(
    ("variable", "text", "allowed"),
    [
        ("MS_ROLE", "WORKER", "MS_SCHED, MS_WORKER, MS_PSERVER or MS_SERVER."),
        ("MS_ROLE", "ms_worker", "MS_SCHED, MS_WORKER, MS_PSERVER or MS_SERVER."),
        ("COVEY_LEASE", "etcd://node1", "etcd://HOST:PORT"),
        ("COVEY_LEASE", "etcd://node1:port/prefix", "etcd://HOST:PORT"),
        ("COVEY_LEASE_TIME", "0.5", "1 second or more"),
        ("MS_SCHED_HOST", "999.1.1.1", "DNS name"),
        ("MS_SCHED_HOST", "1.2.3", "DNS name"),
        ("MS_SCHED_HOST", "010.0.0.1", "DNS name"),
        ("MS_SCHED_HOST", "12345", "DNS name"),
        ("MS_SCHED_HOST", "node1:8118", "without a port"),
        ("MS_SCHED_HOST", "[10.0.0.1]", "DNS name"),
        ("MS_SCHED_HOST", "[::1", "DNS name"),
        ("MS_SCHED_HOST", "::1%a b", "DNS name"),
        ("MS_SCHED_HOST", "-node", "DNS name"),
        ("MS_SCHED_HOST", "node..org", "DNS name"),
        ("MS_SCHED_HOST", "knöten", "DNS name"),
        ("MS_SCHED_HOST", "http://node", "DNS name"),
        ("MS_SCHED_HOST", "a." * 127, "DNS name"),
        ("MS_SCHED_PORT", "70000", "a port from 1024 to 65535."),
        ("MS_SCHED_PORT", "1023", "a port from 1024 to 65535."),
        ("MS_SCHED_PORT", "0", "a port from 1024 to 65535."),
        ("MS_SCHED_PORT", "-8118", "a port from 1024 to 65535."),
        ("MS_SCHED_PORT", "eight", "a port from 1024 to 65535."),
        ("MS_SCHED_PORT", "8118.0", "a port from 1024 to 65535."),
        ("MS_SCHED_PORT", "8_118", "a port from 1024 to 65535."),
        ("MS_SCHED_PORT", "٨١١٨", "a port from 1024 to 65535."),
        ("MS_SCHED_PORT", "9" * 5000, "a port from 1024 to 65535."),
        ("MS_NODE_ID", LONG, "at most 100"),
        ("MS_NODE_ID", "a/b", 'without "/"'),
        ("MS_NODE_ID", "a\nb", "printable"),
        ("MS_NODE_ID", "..", 'without "/"'),
        ("MS_WORKER_NUM", "0", "from 1 to 1000000."),
        ("MS_WORKER_NUM", "-1", "from 1 to 1000000."),
        ("MS_WORKER_NUM", "1000001", "from 1 to 1000000."),
        ("MS_WORKER_NUM", "four", "from 1 to 1000000."),
        ("MS_SERVER_NUM", "-1", "from 0 to 1000000."),
        ("MS_WORKER_IP", "node1", "an IPv4 or IPv6 address."),
        ("MS_WORKER_IP", "10.0.0.256", "an IPv4 or IPv6 address."),
        ("MS_ENABLE_RECOVERY", "true", "0 (off) or 1 (on)."),
        ("MS_ENABLE_RECOVERY", "2", "0 (off) or 1 (on)."),
        ("MS_RECOVERY_PATH", "a\udcff", "a path in UTF-8 without control characters."),
        ("MS_RECOVERY_PATH", "a\tb", "a path in UTF-8 without control characters."),
        ("MS_TOPO_TIMEOUT", "soon", "a negative number for no limit."),
        ("MS_TOPO_TIMEOUT", "0", "a negative number for no limit."),
        ("MS_TOPO_TIMEOUT", "nan", "a negative number for no limit."),
        ("MS_NODE_TIMEOUT", "inf", "a negative number for no limit."),
        ("MS_NODE_TIMEOUT", "9" * 400, "a negative number for no limit."),
        ("MS_RECEIVE_MSG_TIMEOUT", "0", "a number of seconds above 0."),
        ("MS_RECEIVE_MSG_TIMEOUT", "-1", "a number of seconds above 0."),
        ("MS_RETRY_INTERVAL_LOWER", "0", "a number of seconds above 0."),
        ("MS_RETRY_INTERVAL_UPPER", "5s", "a number of seconds above 0."),
        ("MS_DISABLE_HEARTBEAT", "on", "0 (off) or 1 (on)."),
        ("MS_SCHED_MANAGE_PORT", "80", "0 or a port from 1024 to 65535."),
        ("GLOG_v", "5", "4 (critical)."),
        ("GLOG_v", "info", "4 (critical)."),
        ("GLOG_log_dir", "a\x1bb", "a path in UTF-8 without control characters."),
        ("GLOG_logtostderr", "2", "0 (off) or 1 (on)."),
        ("COVEY_SECRET_FILE", "a\nb", "a path in UTF-8 without control characters."),
        ("COVEY_HOST_ID", LONG, "at most 100"),
        ("COVEY_GRACE", "-1", "a number of seconds, 0 or more."),
        ("COVEY_JOB", "a/b", 'without "/"'),
    ],
)
def test_invalid_value_error_names_variable_value_and_expected_values(variable: str, text: str, allowed: str) -> None:
    message = refusal({variable: text})
    visible = text if text.isprintable() else ascii(text)
    assert message.startswith(f"{variable}={visible[:80]}")
    assert " is invalid: expected " in message
    assert message.endswith(".") and allowed in message
    assert message.isprintable() and len(message) < 300


def test_invalid_port_error_text() -> None:
    assert refusal({"MS_SCHED_PORT": "70000"}) == "MS_SCHED_PORT=70000 is invalid: expected a port from 1024 to 65535."


@pytest.mark.parametrize("variable", ["COVEY_SECRET", "COVEY_TOKEN"])
def test_invalid_secret_error_does_not_show_value(variable: str) -> None:
    message = refusal({variable: "hush\n"})
    assert variable in message and "hush" not in message


def test_every_setting_has_a_unique_variable() -> None:
    assert list(TABLE) == list(Settings.__struct_fields__)
    assert len(FIELD_BY_VARIABLE) == len(TABLE)


def test_empty_variable_counts_as_unset() -> None:
    loaded = load_settings(dict.fromkeys(FIELD_BY_VARIABLE, ""))
    assert loaded.settings == Settings()
    assert set(loaded.origins.values()) == {"default"}


def test_retry_interval_lower_above_upper_is_refused() -> None:
    message = refusal({"MS_RETRY_INTERVAL_LOWER": "9", "MS_RETRY_INTERVAL_UPPER": "4"})
    assert "MS_RETRY_INTERVAL_LOWER=9" in message and "MS_RETRY_INTERVAL_UPPER=4" in message
    assert "MS_RETRY_INTERVAL_UPPER=5 (default)" in refusal({"MS_RETRY_INTERVAL_LOWER": "6"})
    assert load_settings({"MS_RETRY_INTERVAL_LOWER": "5"}).settings.retry_lower_s == 5.0


def test_logging_to_files_requires_log_dir() -> None:
    assert "GLOG_log_dir" in refusal({"GLOG_logtostderr": "0"})
    assert load_settings({"GLOG_logtostderr": "0", "GLOG_log_dir": "logs"}).settings.log_to_stderr is False


@pytest.mark.parametrize(("worker", "scheduler"), [("10.0.0.1", "::1"), ("fe80::1%eth0", "10.0.0.1")])
def test_mixed_ip_families_error_names_both_addresses(worker: str, scheduler: str) -> None:
    message = refusal({"MS_WORKER_IP": worker, "MS_SCHED_HOST": scheduler})
    assert f"MS_WORKER_IP={worker}" in message and f"MS_SCHED_HOST={scheduler}" in message


def test_scheduler_dns_name_is_valid_with_any_ip_family() -> None:
    assert load_settings({"MS_WORKER_IP": "::1", "MS_SCHED_HOST": "node1"}).settings.worker_ip == "::1"


# -- layers ----------------------------------------------------------------------------------------------------------


def test_flags_override_environment_override_file_override_defaults(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('sched_port = 2000\nMS_WORKER_NUM = 2\ngrace_s = 0.5\nrecovery = true\nMS_NODE_ID = "a"\n')
    environ = {"MS_SCHED_PORT": "3000", "MS_WORKER_NUM": "3"}
    loaded = load_settings(environ, flags={"sched_port": GivenValue("4000", "--master-port")}, file=file)
    settings, origins = loaded.settings, loaded.origins
    assert (settings.sched_port, origins["sched_port"]) == (4000, "--master-port")
    assert (settings.worker_num, origins["worker_num"]) == (3, "MS_WORKER_NUM")
    assert (settings.grace_s, origins["grace_s"]) == (0.5, str(file))
    assert (settings.recovery, settings.node_id) == (True, "a")
    assert (settings.topo_timeout_s, origins["topo_timeout_s"]) == (1800.0, "default")


def test_json_settings_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"sched_host": "node1", "MS_TOPO_TIMEOUT": -1, "disable_heartbeat": False}))
    settings = load_settings({}, file=file).settings
    assert (settings.sched_host, settings.topo_timeout_s, settings.disable_heartbeat) == ("node1", -1.0, False)


def test_valid_flag_overrides_invalid_variable() -> None:
    flags = {"sched_port": GivenValue(4000, "--master-port")}
    assert load_settings({"MS_SCHED_PORT": "eight"}, flags=flags).settings.sched_port == 4000


def test_invalid_flag_error_names_option_as_typed() -> None:
    with pytest.raises(UsageError, match=r"^--master_port 80 is invalid: expected a port from 1024 to 65535\.$"):
        load_settings({}, flags={"sched_port": GivenValue("80", "--master_port")})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("c.toml", "sched_port = 80", "MS_SCHED_PORT=80 in"),
        ("c.toml", "sched_prot = 8118", "sched_prot, which is not a setting: did you mean sched_port?"),
        ("c.toml", "sched_port = [8118]", "expected a string, a number, true or false"),
        ("c.json", '{"sched_port": null}', "expected a string, a number, true or false"),
        ("c.toml", "sched_port = 8118\nMS_SCHED_PORT = 8118", "twice"),
        ("c.toml", "sched_port = ", "cannot be parsed"),
        ("c.json", "[1]", "cannot be parsed"),
        ("c.json", '{"a": ' * 5000, "cannot be parsed"),
        ("c.toml", "worker_num = " + "9" * 5000, "cannot be parsed"),
        ("c.toml", "worker_num = 0x" + "f" * 5000, "expected a string, a number, true or false"),
        ("c.toml", "#" * 1_000_001, "larger than"),
        ("c.yaml", "", ".toml or .json"),
    ],
)
def test_invalid_settings_file_error_names_file(tmp_path: Path, name: str, content: str, words: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(UsageError) as caught:
        load_settings({}, file=file)
    assert words in str(caught.value) and str(file) in str(caught.value)


def test_missing_settings_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_settings({}, file=tmp_path / "nowhere.toml")


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(FIELD_BY_VARIABLE)), st.text(max_size=30)))
def test_any_environment_loads_or_raises_printable_usage_error(environ: dict[str, str]) -> None:
    try:
        loaded = load_settings(environ)
    except UsageError as error:
        assert str(error).isprintable() and str(error).endswith(".")
    else:
        assert msgspec.json.decode(msgspec.json.encode(loaded), type=LoadedSettings) == loaded


# -- started by hand -------------------------------------------------------------------------------------------------

WORKER = {"MS_ROLE": "MS_WORKER", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "8118", "MS_WORKER_NUM": "8"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"MS_ROLE": "MS_SCHED", "MS_NODE_ID": "sched"},
        {"MS_ROLE": "MS_PSERVER", "MS_SERVER_NUM": "1"},
        {"MS_ROLE": "MS_PSERVER", "MS_SERVER_NUM": "1", "MS_WORKER_NUM": ""},
        {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": "/tmp/r"},
        {"MS_SCHED_PORT": "11202"},
        {"MS_ROLE": "MS_SCHED", "MS_SCHED_PORT": "11202", "MS_SCHED_MANAGE_PORT": "0"},
    ],
)
def test_complete_manual_settings_are_accepted(changes: dict[str, str]) -> None:
    check_manual_settings(load_settings(WORKER | changes).settings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"MS_ROLE": ""}, ["MS_ROLE is not set", "MS_SCHED_HOST=127.0.0.1", "MS_PSERVER"]),
        ({"MS_ROLE": "", "MS_SCHED_HOST": ""}, ["MS_ROLE is not set:"]),
        ({"MS_SCHED_HOST": ""}, ["MS_SCHED_HOST is not set", "MS_ROLE=MS_WORKER"]),
        ({"MS_SCHED_PORT": ""}, ["MS_SCHED_PORT is not set", "MS_ROLE=MS_WORKER"]),
        ({"MS_WORKER_NUM": ""}, ["MS_WORKER_NUM is not set", "MS_ROLE=MS_WORKER"]),
        ({"MS_WORKER_NUM": "", "MS_ROLE": "MS_SCHED"}, ["MS_WORKER_NUM is not set", "MS_ROLE=MS_SCHED"]),
        ({"MS_ROLE": "MS_PSERVER"}, ["MS_SERVER_NUM is not set", "MS_ROLE=MS_PSERVER"]),
        ({"MS_ROLE": "MS_SERVER", "MS_SERVER_NUM": "0"}, ["MS_SERVER_NUM is not set", "MS_ROLE=MS_SERVER"]),
        ({"MS_ENABLE_RECOVERY": "1"}, ["MS_RECOVERY_PATH is not set", "MS_ENABLE_RECOVERY=1"]),
        ({"MS_ROLE": "MS_SCHED", "MS_SCHED_PORT": "11202"}, ["MS_SCHED_PORT and MS_SCHED_MANAGE_PORT are both 11202"]),
    ],
)
def test_missing_variable_error_names_variable_and_role(changes: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        check_manual_settings(load_settings(WORKER | changes).settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)


# -- output ----------------------------------------------------------------------------------------------------------


def test_settings_table_formats_values_like_variables_and_hides_secrets() -> None:
    loaded = load_settings(
        {"MS_ROLE": "MS_SCHED", "COVEY_SECRET": "mellon", "MS_NODE_TIMEOUT": "0.5", "MS_ENABLE_RECOVERY": "1"}
    )
    table = {name: (value, origin) for name, value, origin, description in settings_table(loaded) if description}
    assert list(table) == list(FIELD_BY_VARIABLE)
    assert table["MS_ROLE"] == ("MS_SCHED", "MS_ROLE")
    assert table["COVEY_SECRET"] == ("(set)", "COVEY_SECRET")
    assert table["COVEY_TOKEN"] == ("", "default")
    assert table["MS_NODE_TIMEOUT"] == ("0.5", "MS_NODE_TIMEOUT")
    assert table["MS_TOPO_TIMEOUT"] == ("1800", "default")
    assert table["MS_ENABLE_RECOVERY"] == ("1", "MS_ENABLE_RECOVERY")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("MS_WORKER_NUMS", "MS_WORKER_NUM"),
        ("MS_WORKERNUM", "MS_WORKER_NUM"),
        ("MS_SCHED_PROT", "MS_SCHED_PORT"),
        ("ms_role", "MS_ROLE"),
        ("GLOG_V", "GLOG_v"),
        ("COVEY_SECRETFILE", "COVEY_SECRET_FILE"),
    ],
)
def test_misspelled_variable_is_reported_with_suggestion(typed: str, meant: str) -> None:
    (message,) = misspelled_variables({typed: "1", "PATH": "/bin"})
    assert message == f"{typed} is set but is not a setting: did you mean {meant}?"


@pytest.mark.parametrize(
    "variable",
    [
        *FIELD_BY_VARIABLE,
        *("MS_RECOVERY_INTERVAL", "MS_SIMULATION_LEVEL", "MS_ENABLE_TFT", "MS_TFT_PORT", "MS_DEV_NODE_ID"),
        *("GLOG_max_log_size", "MS_ENABLE_GRACEFUL_EXIT", "MS_COMPILER_CACHE_PATH", "PATH", "WORKER_NUM"),
    ],
)
def test_known_or_foreign_variable_is_not_reported(variable: str) -> None:
    assert misspelled_variables({variable: "1"}) == []
