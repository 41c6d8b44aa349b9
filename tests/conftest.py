"""Options, skips and the summary of skips, for all tests."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from hypothesis import settings
from tests.requirements import require

os.environ.pop("PYTHONUNBUFFERED", None)  # a test must not pass only if the caller exports it
signal.signal(signal.SIGINT, signal.default_int_handler)  # `make test &` in a script ignores SIGINT, `nohup make test` SIGHUP:
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the processes of the tests would inherit that, and tests send both
settings.register_profile("patient", deadline=None)  # machines are shared: how long an example takes says nothing
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail the run if a test is skipped")
    parser.addoption("--long", action="store_true", help="run the tests marked long, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked long, unless --long is given."""
    if not config.getoption("--long"):
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `needs` before its fixtures are made."""
    for mark in item.iter_markers("needs"):
        require(*mark.args)


def skips(reporter: pytest.TerminalReporter) -> Counter[str]:
    """Return the reasons of all skips of the run, with the number of tests."""
    reports = reporter.stats.get("skipped", [])
    reasons = (report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr) for report in reports)
    return Counter(reason.removeprefix("Skipped: ") for reason in reasons)


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--no-skips") and reporter is not None and skips(reporter):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List each reason of a skip, which ends with the command that brings the missing part, and the number of tests."""
    found = skips(terminalreporter)
    if not found:
        return
    failed = config.getoption("--no-skips")
    title = "skipped, which --no-skips forbids" if failed else "skipped: missing parts and the commands that install them"
    terminalreporter.section(title, red=failed, yellow=not failed)
    for reason, count in found.most_common():
        terminalreporter.line(f"{count:4} test{'s' if count > 1 else ' '}  {reason}")
