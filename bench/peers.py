"""Other systems, each in an environment of its own under `.peers/`, installed when it is first wanted."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".peers"
CONSTRAINTS = FOLDER.with_name("constraints.txt")
INSTALL_S = 600.0


def python_of(name: str, *packages: str) -> Path | None:
    """The interpreter of a peer's environment; None, with a sentence, where it does not install."""
    folder = FOLDER / name
    python, stamp = folder / "bin" / "python", folder / "installed"
    if stamp.exists() and stamp.read_text().split() == list(packages):
        return python
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
