"""Restarts of a child process: delays and limit."""

from __future__ import annotations

from covey.runtime.restart_backoff import RestartBackoff


def test_early_exits_use_one_delay_each_until_none_is_left() -> None:
    backoff = RestartBackoff((0.0, 0.1, 0.2), stable_after_s=30.0)
    assert [backoff.record_exit(1.0) for _ in range(4)] == [0.0, 0.1, 0.2, None]
    assert backoff.exits == 4


def test_exit_after_stable_run_counts_as_first() -> None:
    backoff = RestartBackoff((0.0, 0.1), stable_after_s=30.0)
    assert [backoff.record_exit(lifetime) for lifetime in (1.0, 29.9, 30.0, 1.0, 1.0)] == [0.0, 0.1, 0.0, 0.1, None]
