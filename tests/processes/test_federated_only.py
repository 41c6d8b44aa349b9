"""A script that calls set_fl_context(enable_fl=True) and not covey.federated.run never trains alone silently."""

from __future__ import annotations

import sys

import pytest
from tests.processes.command import Shell

CONTEXT = """
import covey

covey.set_fl_context(enable_fl=True, server_mode="FEDERATED_LEARNING", ms_role={role!r}, server_num=4, fl_name="LeNet")
"""
NEEDED = "call covey.federated.run(model), which replaces covey.init()"


@pytest.mark.parametrize("role", ["MS_SERVER", "MS_SCHED"])
def test_init_is_refused_after_set_fl_context(shell: Shell, role: str) -> None:
    script = shell.script(CONTEXT.format(role=role) + "covey.init()\nprint('world', covey.get_group_size())\n")
    process = shell.run([sys.executable, script])
    assert process.code == 10, process.tail()
    output = f"covey: set_fl_context(enable_fl=True) makes this process a federated {role}: {NEEDED}"
    [line] = process.text().splitlines()
    assert line.startswith(output)


def test_init_in_mindspore_script_names_federated_run(shell: Shell) -> None:
    """`set_fl_context(**fl_ctx)` and then `model.train()`, as MindSpore's script does."""
    script = shell.script(CONTEXT.format(role="MS_SERVER") + "covey.Model(None, None, None).train(1, None)\n")
    process = shell.run([sys.executable, script])
    assert process.code == 1, process.tail()
    assert (
        process.text().splitlines()[-1].startswith("covey.errors.UsageError: set_fl_context(enable_fl=True) makes this process")
    )
    assert process.text().count(NEEDED) == 1 and "covey.init() first" not in process.text()


def test_script_that_ends_without_run_is_reported(shell: Shell) -> None:
    process = shell.run([sys.executable, shell.script(CONTEXT.format(role="MS_SERVER"))])
    assert process.code == 0
    [line] = process.text().splitlines()
    assert line.startswith("covey: the script ended without a federated cluster: ") and NEEDED in line


@pytest.mark.parametrize("words", ["covey.set_fl_context(enable_fl=False)", "covey.reset_fl_context()"])
def test_reset_context_is_a_world_of_one(shell: Shell, words: str) -> None:
    script = CONTEXT.format(role="MS_SERVER") + f"{words}\ncovey.init()\nprint('world', covey.get_group_size())\n"
    process = shell.run([sys.executable, shell.script(script)])
    assert (process.code, process.text()) == (0, "world 1\n")


def test_script_of_federated_up_that_calls_init_is_refused(shell: Shell) -> None:
    script = shell.script("import covey\ncovey.init()\nprint('world', covey.get_group_size())\n")
    process = shell.run([sys.executable, script], env={"COVEY_FL_CONTEXT": '{"enable_fl": true, "ms_role": "MS_SCHED"}'})
    assert process.code == 10 and NEEDED in process.text() and "world" not in process.text(), process.tail()


def test_federated_up_refuses_missing_config_file(shell: Shell) -> None:
    up = shell.run_command("federated", "up", "--set", "config_file_path=no.json", shell.script("", "model.py"))
    assert up.code == 10 and "config_file_path=no.json is not a file" in up.text(), up.tail()
