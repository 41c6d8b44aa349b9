"""set_ps_context: MindSpore's keys, defaults, error messages, reset."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from covey import ps_context
from covey.errors import ExitCode, UsageError
from covey.ps_context import get_ps_context, is_set, reset_ps_context, set_ps_context


@pytest.fixture(autouse=True)
def _reset_context() -> Iterator[None]:
    reset_ps_context()
    yield
    reset_ps_context()


def refusal(**kwargs: object) -> str:
    with pytest.raises(UsageError) as caught:
        set_ps_context(**kwargs)  # type: ignore[arg-type]
    assert caught.value.exit_code is ExitCode.BAD_SETTING
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_match_mindspore() -> None:
    assert get_ps_context("enable_ps") is False
    assert get_ps_context("enable_ssl") is False
    assert get_ps_context("scheduler_manage_port") == 11202
    assert get_ps_context("config_file_path") == ""
    assert get_ps_context("client_password") == ""
    assert get_ps_context("server_password") == ""


def test_mindspore_example_call_is_accepted() -> None:
    set_ps_context(
        config_file_path="/path/to/config_file.json", enable_ssl=True, client_password="123456", server_password="654321"
    )
    assert get_ps_context("config_file_path") == "/path/to/config_file.json"
    assert get_ps_context("enable_ssl") is True
    assert get_ps_context("client_password") == "123456"
    assert get_ps_context("server_password") == "654321"


def test_later_call_keeps_earlier_keys() -> None:
    set_ps_context(enable_ps=True, scheduler_manage_port=0)
    set_ps_context(scheduler_manage_port=65535)
    assert get_ps_context("enable_ps") is True
    assert get_ps_context("scheduler_manage_port") == 65535


def test_undocumented_mindspore_keys_are_accepted() -> None:
    set_ps_context(ms_role="MS_WORKER", worker_num=8, server_num=1, scheduler_ip="127.0.0.1", scheduler_port=8118)
    assert get_ps_context("ms_role") == "MS_WORKER"
    assert get_ps_context("worker_num") == 8
    assert get_ps_context("server_num") == 1
    assert get_ps_context("scheduler_ip") == "127.0.0.1"
    assert get_ps_context("scheduler_port") == 8118


def test_reset_restores_all_defaults_including_tls() -> None:
    set_ps_context(enable_ps=True, enable_ssl=True, client_password="secret", scheduler_manage_port=1, worker_num=3)
    reset_ps_context()
    for key, default in ps_context.DEFAULTS.items():
        assert get_ps_context(key) == default
        assert not is_set(key)


def test_is_set_distinguishes_set_value_from_equal_default() -> None:
    assert not is_set("scheduler_manage_port")
    set_ps_context(scheduler_manage_port=11202)
    assert is_set("scheduler_manage_port")


def test_unknown_key_error_suggests_nearest_key() -> None:
    assert "did you mean enable_ssl?" in refusal(enable_sssl=True)
    assert "did you mean client_password?" in refusal(client_pasword="x")
    for ask in (get_ps_context, is_set):
        with pytest.raises(UsageError, match=r"no key config_file: did you mean config_file_path\?"):
            ask("config_file")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("enable_ps", 1, "True or False"),
        ("enable_ssl", "yes", "'yes'"),
        ("enable_ssl", None, "None"),
        ("config_file_path", None, "a string"),
        ("config_file_path", b"x", "a string"),
        ("scheduler_manage_port", True, "an integer"),
        ("scheduler_manage_port", "11202", "an integer"),
        ("scheduler_manage_port", 65536, "0 to 65535, not 65536"),
        ("scheduler_port", -1, "0 to 65535, not -1"),
        ("worker_num", -1, "not -1"),
        ("client_password", None, "a string, not NoneType"),
        ("server_password", "x" * 1024, "shorter than 1024 bytes, not 1024"),
        ("server_password", "ü" * 512, "shorter than 1024 bytes, not 1024"),
    ],
)
def test_invalid_value_error_names_key_and_expected_value(key: str, value: object, words: str) -> None:
    message = refusal(**{key: value})
    assert key in message
    assert words in message


def test_password_of_1023_bytes_is_accepted() -> None:
    set_ps_context(client_password="x" * 1023)
    assert get_ps_context("client_password") == "x" * 1023


def test_invalid_key_leaves_context_unchanged() -> None:
    refusal(enable_ssl=True, scheduler_manage_port=-1)
    assert get_ps_context("enable_ssl") is False


def test_passwords_are_not_in_repr_or_errors() -> None:
    set_ps_context(client_password="hunter2", server_password="hunter3", enable_ssl=True)
    assert "hunter" not in repr(ps_context._context)
    assert "enable_ssl=True" in repr(ps_context._context)
    assert "hunter" not in refusal(client_password=b"hunter4")
    assert "hunter" not in refusal(client_password="hunter" * 200)
