"""The effects of every state machine in the simulations, recorded as digests: `python -m tests.traces COMMAND`.

    record                      write tests/traces/record/ (make traces); an interrupted run is resumed
    check [--plain]             compare the present code with the record (make traces-check)
    compare OLD NEW [--plain]   compare two versions of the code, each a folder or a git revision
    show GAME SEED              print every call of the machines of one game
    digests                     print the digests of the present code

`check`, `compare` and `digests` take a part with `--games cluster,servers --seeds 0:200`; `record` takes `--games`. `--plain`
ignores prose. The first difference is printed with the game, its seed, the number and time of the call, the event, and a diff
of the lists of effects.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.traces import record
from tests.traces.games import GAMES, calls
from tests.traces.rendering import full
from tests.traces.versions import Version, check_source, checkout, first_difference, recorded_by

ROOT = Path(__file__).parents[2]


def main() -> int:
    options = _parser().parse_args()
    check_source(ROOT)
    if options.command == "show":
        _show(options)
        return 0
    chosen = {name: _numbers(name, options.seeds) for name in options.games.split(",")}
    if options.command == "record":
        if options.seeds:
            raise SystemExit("--seeds is not for `record`: a record has all seeds")
        for name in chosen:
            record.write(name, options.processes)
        return 0
    if options.command == "check":
        return _check(chosen, options)
    if options.command == "compare":
        with contextlib.ExitStack() as stack:
            old, new = (stack.enter_context(checkout(name, ROOT)) for name in (options.old, options.new))
            found = any(_differs(old, new, name, numbers, options.plain) for name, numbers in chosen.items())
        return 1 if found else 0
    for name, numbers in chosen.items():
        for line in record.digests(name, numbers, options.processes):
            print(line, flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.traces", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    part = argparse.ArgumentParser(add_help=False)
    part.add_argument("--games", default=",".join(GAMES), help="some of the games, separated by commas")
    part.add_argument("--seeds", default="", help="A:B, from A to B - 1; or one seed")
    part.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record", parents=[part])
    commands.add_parser("digests", parents=[part])
    check = commands.add_parser("check", parents=[part])
    compare = commands.add_parser("compare", parents=[part])
    for one in (check, compare):
        one.add_argument("--plain", action="store_true", help="ignore prose")
    compare.add_argument("old")
    compare.add_argument("new")
    show = commands.add_parser("show")
    show.add_argument("games", metavar="game", choices=GAMES)
    show.add_argument("seeds", metavar="seed")
    show.add_argument("--json", action="store_true", help="one document a line, with prose between \\x02 and \\x03")
    return parser


def _numbers(name: str, asked: str) -> range:
    """Return the seeds of a game that were asked for; all of them if none were named, or if it has no seeds."""
    if name not in GAMES:
        raise SystemExit(f"--games {name} is unknown: expected some of {', '.join(GAMES)}")
    whole = range(GAMES[name].size)
    if not asked or name == "scenarios":
        return whole
    first, colon, last = asked.partition(":")
    try:
        found = range(int(first), int(last) if colon else int(first) + 1)
    except ValueError:
        raise SystemExit(f"--seeds {asked} is invalid: expected A:B or one number") from None
    if not 0 <= found.start < found.stop <= whole.stop:
        raise SystemExit(f"--seeds {asked} is invalid: {name} has the seeds 0:{whole.stop}")
    return found


def _check(chosen: dict[str, range], options: argparse.Namespace) -> int:
    """Compare with the record; print how many games differ and the first difference."""
    failed = False
    for name, numbers in chosen.items():
        differing = record.compare(name, numbers, options.processes, options.plain)
        print(f"{name}: {len(differing)} of {len(numbers)} differ from the record", flush=True)
        if not differing:
            continue
        failed = True
        print("".join(f"  {line}\n" for line in differing[:5]), end="", flush=True)
        made = recorded_by(ROOT, record.FOLDER / f"{name}.txt")
        if not made:
            print(
                "the version that made this record is unknown, because this is not a git checkout: no difference can be shown"
            )
            continue
        first = record.number(name, differing[0])
        with checkout(made, ROOT) as old:
            _differs(old, Version(".", ROOT), name, range(first, first + 1), options.plain)
    return 1 if failed else 0


def _differs(old: Version, new: Version, name: str, numbers: range, plain: bool) -> bool:
    difference = first_difference(old, new, name, numbers, plain)
    print(difference or f"{name}: no difference in {len(numbers)} games", flush=True)
    return bool(difference)


def _show(options: argparse.Namespace) -> None:
    for line in _lines(options.games, record.number(options.games, options.seeds), options.json):
        print(line)


def _lines(name: str, number: int, as_json: bool) -> Iterator[str]:
    for index, call in enumerate(calls(name, number)):
        if as_json:
            yield record.encoded(call)
        else:
            yield full("\n    ".join([f"{index} at {call.time}, {call.machine}: {call.event}", *call.effects]))


if __name__ == "__main__":
    sys.exit(main())
