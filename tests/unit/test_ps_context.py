"""The seeds' set_ps_context: what may be said, what is refused, and that a reset forgets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from covey import ps_context
from covey.errors import ExitCode, UsageError
from covey.ps_context import get_ps_context, is_set, reset_ps_context, set_ps_context


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    reset_ps_context()
    yield
    reset_ps_context()


def refusal(**kwargs: object) -> str:
    with pytest.raises(UsageError) as caught:
        set_ps_context(**kwargs)  # type: ignore[arg-type]
    assert caught.value.exit_code is ExitCode.BAD_SETTING
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_seeds_defaults() -> None:
    assert get_ps_context("enable_ps") is False
    assert get_ps_context("enable_ssl") is False
    assert get_ps_context("scheduler_manage_port") == 11202
    assert get_ps_context("config_file_path") == ""
    assert get_ps_context("client_password") == ""
    assert get_ps_context("server_password") == ""


def test_the_seeds_call() -> None:
    set_ps_context(
        config_file_path="/path/to/config_file.json", enable_ssl=True, client_password="123456", server_password="654321"
    )
    assert get_ps_context("config_file_path") == "/path/to/config_file.json"
    assert get_ps_context("enable_ssl") is True
    assert get_ps_context("client_password") == "123456"
    assert get_ps_context("server_password") == "654321"


def test_later_calls_add_to_earlier_ones() -> None:
    set_ps_context(enable_ps=True, scheduler_manage_port=0)
    set_ps_context(scheduler_manage_port=65535)
    assert get_ps_context("enable_ps") is True
    assert get_ps_context("scheduler_manage_port") == 65535


def test_the_originals_undocumented_keys_are_taken() -> None:
    set_ps_context(ms_role="MS_WORKER", worker_num=8, server_num=1, scheduler_ip="127.0.0.1", scheduler_port=8118)
    assert get_ps_context("ms_role") == "MS_WORKER"
    assert get_ps_context("worker_num") == 8
    assert get_ps_context("server_num") == 1
    assert get_ps_context("scheduler_ip") == "127.0.0.1"
    assert get_ps_context("scheduler_port") == 8118


def test_a_reset_forgets_everything_tls_included() -> None:
    set_ps_context(enable_ps=True, enable_ssl=True, client_password="secret", scheduler_manage_port=1, worker_num=3)
    reset_ps_context()
    for key, default in ps_context.DEFAULTS.items():
        assert get_ps_context(key) == default
        assert not is_set(key)


def test_what_was_set_is_told_from_a_default_of_the_same_value() -> None:
    assert not is_set("scheduler_manage_port")
    set_ps_context(scheduler_manage_port=11202)
    assert is_set("scheduler_manage_port")


def test_an_unknown_key_names_the_nearest_one() -> None:
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
        ("scheduler_manage_port", True, "a whole number"),
        ("scheduler_manage_port", "11202", "a whole number"),
        ("scheduler_manage_port", 65536, "0 to 65535, not 65536"),
        ("scheduler_port", -1, "0 to 65535, not -1"),
        ("worker_num", -1, "not -1"),
        ("client_password", None, "a string, not NoneType"),
        ("server_password", "x" * 1024, "shorter than 1024 bytes, not 1024"),
        ("server_password", "ü" * 512, "shorter than 1024 bytes, not 1024"),
    ],
)
def test_a_value_that_is_not_allowed_is_one_sentence(key: str, value: object, words: str) -> None:
    sentence = refusal(**{key: value})
    assert key in sentence
    assert words in sentence


def test_a_password_may_have_1023_bytes() -> None:
    set_ps_context(client_password="x" * 1023)
    assert get_ps_context("client_password") == "x" * 1023


def test_one_bad_key_changes_nothing() -> None:
    refusal(enable_ssl=True, scheduler_manage_port=-1)
    assert get_ps_context("enable_ssl") is False


def test_passwords_are_never_shown() -> None:
    set_ps_context(client_password="hunter2", server_password="hunter3", enable_ssl=True)
    assert "hunter" not in repr(ps_context._context)
    assert "enable_ssl=True" in repr(ps_context._context)
    assert "hunter" not in refusal(client_password=b"hunter4")
    assert "hunter" not in refusal(client_password="hunter" * 200)
