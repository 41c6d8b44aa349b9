"""Lists the code that only a recovery runs: `python docs/recovery_path.py` trains three times and kills a worker the last time.

Every process of all runs notes which functions of covey it calls. What only the last run calls is the code of a recovery,
from "a process died" to "all ranks have resumed". docs/architecture.md has the list of its modules, in the order of their first
calls. Modules that only define data are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
SCRIPT = ROOT / "examples" / "02_healing.py"
STEPS = 200
DATA = frozenset(("covey.core.effects", "covey.core.events", "covey.core.incidents", "covey.core.messages", "covey.core.types"))
CALLS_VARIABLE, SOURCE_VARIABLE = "RECOVERY_PATH_CALLS", "RECOVERY_PATH_SOURCE"

# Python imports a module of this name when it starts; a process that is forked keeps the profile function.
SITECUSTOMIZE = f"""
import os, sys, threading, time

def write_call(frame, event, arg, seen=set(), source=os.environ["{SOURCE_VARIABLE}"] + os.sep):
    code = frame.f_code
    if event == "call" and code not in seen and code.co_filename.startswith(source):
        seen.add(code)
        path = code.co_filename[len(source):-len(".py")].replace(os.sep, ".").removesuffix(".__init__")
        line = f"{{time.time():.6f}} {{path}} {{code.co_qualname}}\\n"
        file = os.open(os.environ["{CALLS_VARIABLE}"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, line.encode())
        os.close(file)

threading.setprofile(write_call)
sys.setprofile(write_call)
"""


def record_calls(folder: Path, name: str, *arguments: str) -> dict[tuple[str, str], float]:
    """Run the training; return the time of the first call of each function, by module and name."""
    calls = folder / name
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "STEPS": str(STEPS),
        CALLS_VARIABLE: str(calls),
        SOURCE_VARIABLE: str(SOURCE),
    }
    command = [sys.executable, "-m", "covey", "run", "-n", "2", "--log-dir", str(folder), str(SCRIPT), *arguments]
    subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=300)
    first: dict[tuple[str, str], float] = {}
    for line in calls.read_text().splitlines():
        time, module, function = line.split(" ", 2)
        if "<" not in function:  # a comprehension or a lambda belongs to the function around it
            first[module, function] = min(first.get((module, function), float("inf")), float(time))
    return first


def list_recovery_functions() -> dict[str, list[str]]:
    """Return the functions that only a recovery calls, by module, both in the order of their first calls."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(SITECUSTOMIZE)
        usual = record_calls(Path(folder), "first") | record_calls(Path(folder), "undisturbed")  # the first run fills caches
        healed = record_calls(Path(folder), "healed", "--kill", "1")
    found: dict[str, list[str]] = {}
    for module, function in sorted(healed.keys() - usual.keys(), key=lambda call: healed[call]):
        if module not in DATA:
            found.setdefault(module, []).append(function)
    return found


def describe(functions: dict[str, list[str]]) -> str:
    """Return the number of modules and, for each, the functions that a recovery calls first."""
    core = sum(module.startswith("covey.core.") for module in functions)
    lines = [f"{module}: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}" for module, names in functions.items()]
    return "\n".join([f"{len(functions)} modules, {core} of them in core/", *lines, ""])


if __name__ == "__main__":
    sys.stdout.write(describe(list_recovery_functions()))
