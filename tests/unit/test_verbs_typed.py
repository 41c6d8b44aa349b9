"""The command line as such: examples that can be typed, mistakes that are one sentence, JSON for every verb that prints."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click
import pytest
from click.shell_completion import ShellComplete

from covey.cli import main as command
from covey.cli.completion import SHELLS, script
from covey.cli.main import verbs

PRINTS_NO_JSON = {"run", "completion", "federated up", "operator run"}  # they run, or print what a shell reads


def every(group: click.Group = verbs, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from every(found, f"{path}{name} ")
        else:
            yield f"{path}{name}", found


VERBS = dict(every())


@pytest.mark.parametrize("name", [name for name in VERBS if name != "run"])
def test_the_examples_of_a_verb_can_be_typed(name: str) -> None:
    lines = [line.strip() for line in (VERBS[name].epilog or "").splitlines()[2:]]
    assert lines, f"covey {name} --help has no example"
    for line in lines:
        words = shlex.split(line, comments=False)
        start = next((at for at, word in enumerate(words) if word == "covey"), -1)
        if start < 0:  # inside $( )
            assert f"covey {name}" in line
            continue
        typed = words[start + 1 : words.index(">") if ">" in words else None]
        assert typed[: len(name.split())] == name.split(), line
        VERBS[name].make_context(name, typed[len(name.split()) :])  # raises where it cannot be


def test_every_verb_that_prints_has_json() -> None:
    without = {name for name, verb in VERBS.items() if not any("--json" in param.opts for param in verb.params)}
    assert without == PRINTS_NO_JSON


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("statsu", "covey: No such command 'statsu'. Did you mean 'status'?\n"),
        ("status --what", "covey: No such option '--what'.\n"),
        ("logs two", "covey: Invalid value for '[RANK]': 'two' is not a valid integer.\n"),
        ("scale", "covey: say how many there are to be: --workers N or --servers N\n"),
        ("federated upp", "covey: No such command 'upp'. Did you mean 'up'?\n"),
    ],
)
def test_a_mistake_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    monkeypatch.setattr("sys.argv", ["covey", *words.split()])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert (ended.value.code, capsys.readouterr().err) == (10, sentence)


def test_covey_alone_shows_its_verbs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["covey"])
    command.main()
    assert "covey run -n 4 train.py" in capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_gets_its_script(shell: str) -> None:
    assert "_COVEY_COMPLETE" in script(verbs, shell)


@pytest.mark.parametrize(
    ("typed", "begun", "offered"),
    [([], "st", ["status", "stop", "story"]), (["run"], "--spa", ["--spares"]), (["federated"], "si", ["simulate"])],
)
def test_words_are_completed(typed: list[str], begun: str, offered: list[str]) -> None:
    found = ShellComplete(verbs, {}, "covey", "_COVEY_COMPLETE").get_completions(typed, begun)
    assert [item.value for item in found] == offered
