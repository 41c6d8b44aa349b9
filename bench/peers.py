"""Environments of other systems under `.peers/`, one for each, installed when it is first needed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".peers"
CONSTRAINTS = FOLDER.with_name("constraints.txt")
INSTALL_S = 600.0
EVERY: dict[str, tuple[str, ...]] = {  # packages by environment; COVEY: covey's dependencies
    "torchft": ("torch", "torchft==0.2.0", "numpy"),
    "flower": ("flwr", "numpy"),
    "kopf": ("kopf", "aiohttp"),
    "mindspore": ("mindspore==2.10.0", "COVEY"),
    "fuzz": ("atheris==3.0.0", "COVEY"),  # this and the next are tools, not peers, but are installed in the same way
    "audit": ("pip-audit",),
    "mutation": ("mutmut==3.8.0", "pytest<9", "pytest-timeout", "hypothesis", "COVEY"),
}


def needs() -> list[str]:
    """Return covey's dependencies."""
    found = tomllib.loads(CONSTRAINTS.with_name("pyproject.toml").read_text())["project"]["dependencies"]
    return [requirement.partition(";")[0].strip() for requirement in found]


def python_of(name: str, *, install: bool = True) -> Path | None:
    """Return the interpreter of a peer's environment. Print a message and return None if it is missing and not installed."""
    packages = [word for package in EVERY[name] for word in (needs() if package == "COVEY" else [package])]
    folder = FOLDER / name
    python, stamp = folder / "bin" / "python", folder / "installed"
    if stamp.exists() and stamp.read_text().split() == packages:
        return python
    if not install:
        print(f"{name} is skipped: not installed; run python -m bench.peers {name}", file=sys.stderr, flush=True)
        return None
    print(f"installing {name} into {folder.relative_to(FOLDER.parent)} ...", file=sys.stderr, flush=True)
    try:
        venv.create(folder, clear=True, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS), *packages]
        subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_S)
    except (subprocess.SubprocessError, OSError) as error:
        output = getattr(error, "stderr", None) or str(error).encode()
        last = output.decode(errors="replace").strip().splitlines()[-1:]
        print(f"{name} is skipped: cannot be installed: {' '.join(last)}", file=sys.stderr, flush=True)
        return None
    stamp.write_text(" ".join(packages))
    return python


if __name__ == "__main__":
    pythons = {name: python_of(name) for name in sys.argv[1:] or EVERY}
    print("\n".join(f"{name}: {python or 'cannot be installed'}" for name, python in pythons.items()))
