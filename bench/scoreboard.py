"""Scoreboard of all benchmarks: writes `bench/results/README.md` from the newest result of each.

Every result has a table of aims; the scoreboard has all of them in one table, with time and machine of each measurement.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from bench.peers import FOLDER
from bench.report import QUICK, RESULTS, table

FEDERATED = ("federated", "federated-private", "federated-memory")
ORDER = ("formation", "mindspore", "recovery", "overhead", "takeover", "scale", "scale-ways", "params", *FEDERATED, "operator")
AIMS = re.compile(r"^\| aim \| limit \| found \| held \|\n\|[- |]+\|\n((?:\|.*\|\n?)+)", re.MULTILINE)
PEERS = ("torch", "torchft", "flwr", "kopf", "mindspore")


def rows(name: str, text: str) -> list[list[str]]:
    """Return the aims of one result, each with its benchmark's name."""
    found = AIMS.search(text)
    lines = found[1].splitlines() if found else []
    return [[f"[{name}]({name}.md)", *(cell.strip() for cell in line.strip("|").split("|"))] for line in lines]


def measured(name: str, folder: Path) -> list[str]:
    """Return a table row with the time, machine and load of a measurement."""
    data = json.loads((folder / f"{name}.json").read_text())
    about = data["machine"]
    load = f"{about['load'][0]:.1f} → {data['load_after'][0]:.1f}"
    return [f"[{name}]({name}.md)", about["at"], f"{about['cores']} cores", about["python"], about["torch"], load]


def peer_versions() -> dict[str, str]:
    """Return the versions installed in the peers' environments, by name."""
    found = {}
    for path in sorted(FOLDER.glob("*/lib/python*/site-packages/*.dist-info")):
        name, _, version = path.name.removesuffix(".dist-info").partition("-")
        if name.lower() in PEERS and path.parts[len(FOLDER.parts)] not in ("fuzz", "mutation"):
            found[name.lower()] = version
    return found


def page(folder: Path) -> str:
    there = [name for name in ORDER if (folder / f"{name}.md").exists()]
    aims = [row for name in there for row in rows(name, (folder / f"{name}.md").read_text())]
    held = sum(row[-1] == "yes" for row in aims)
    versions = ", ".join(f"{name} {version}" for name, version in peer_versions().items()) or "none installed here"
    missing = [name for name in ORDER if name not in there]
    parts = [
        "# Scoreboard",
        f"{held} of {len(aims)} aims held. Each number is from the newest run of its benchmark; a ratio is against a peer in"
        " the same invocation, and spreads are [lowest..highest]. `make bench` runs all benchmarks.",
        table(["benchmark", "aim", "limit", "found", "held"], aims),
        table(["benchmark", "measured", "machine", "Python", "torch", "load, then"], [measured(n, folder) for n in there]),
        f"Peers: {versions}." + (f" Not measured: {', '.join(missing)}." if missing else ""),
        *(f"![{name}]({name}.png)" for name in there if (folder / f"{name}.png").exists()),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="use the quick results")
    options = parser.parse_args()
    folder = QUICK if options.quick else RESULTS
    text = page(folder)
    (folder / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
