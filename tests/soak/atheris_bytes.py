"""atheris on one target of `tests.soak.fuzz`: `python -m tests.soak.atheris_bytes frames -max_total_time=60`.

Needs the interpreter of an environment with atheris (`make peers` creates one), with PYTHONPATH=src. libFuzzer's own options
follow the target's name; a crash leaves its input in a file `crash-...` in the current directory.
"""

# mypy: ignore-errors
import sys

import atheris

with atheris.instrument_imports(include=["covey.transport", "covey.management.schemas", "covey.core.messages", "msgspec"]):
    from tests.soak import fuzz


def main() -> None:
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, fuzz.BYTES[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
