"""Other systems, each in an environment of its own under `.peers/`, installed when it is first wanted."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".peers"
CONSTRAINTS = FOLDER.with_name("constraints.txt")
INSTALL_S = 600.0
EVERY: dict[str, tuple[str, ...]] = {  # each in an environment of its own
    "torchft": ("torch", "torchft==0.2.0", "numpy"),
    "flower": ("flwr", "numpy"),
    "kopf": ("kopf", "aiohttp"),
    "mindspore": ("mindspore==2.10.0", "COVEY"),
    "fuzz": ("atheris==3.0.0", "COVEY"),  # tools that need covey beside them: not peers, but installed in the same way
    "audit": ("pip-audit",),
    "mutation": ("mutmut==3.8.0", "pytest<9", "pytest-timeout", "hypothesis", "COVEY"),
}


def needs() -> list[str]:
    """What covey itself depends on."""
    found = tomllib.loads(CONSTRAINTS.with_name("pyproject.toml").read_text())["project"]["dependencies"]
    return [wish.partition(";")[0].strip() for wish in found]


def python_of(name: str, *, install: bool = True) -> Path | None:
    """The interpreter of a peer's environment; None, with a sentence, where it does not install or shall not be installed."""
    packages = [word for wish in EVERY[name] for word in (needs() if wish == "COVEY" else [wish])]
    folder = FOLDER / name
    python, stamp = folder / "bin" / "python", folder / "installed"
    if stamp.exists() and stamp.read_text().split() == packages:
        return python
    if not install:
        print(f"{name} is not installed and is left out: python -m bench.peers {name} brings it", file=sys.stderr, flush=True)
        return None
    print(f"installing {name} into {folder.relative_to(FOLDER.parent)} ...", file=sys.stderr, flush=True)
    try:
        venv.create(folder, clear=True, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS), *packages]
        subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_S)
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        print(f"{name} does not install here and is left out: {' '.join(last)}", file=sys.stderr, flush=True)
        return None
    stamp.write_text(" ".join(packages))
    return python


if __name__ == "__main__":
    there = {name: python_of(name) for name in sys.argv[1:] or EVERY}
    print("\n".join(f"{name}: {python or 'does not install here'}" for name, python in there.items()))
