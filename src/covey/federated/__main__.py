"""`python -m covey.federated MODEL.safetensors`: run a scheduler or server with the model of a file, without a script.

Settings come from COVEY_FL_CONTEXT, which `covey federated up` sets, and the strategy from COVEY_FL_STRATEGY (default FedAvg).
The process exits with code 13 (`BAD_SCRIPT`) if the file cannot be read.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    from covey.errors import ExitCode
    from covey.federated.run_role import run
    from covey.federated.strategies import find_strategy

    path = Path(sys.argv[1])
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        network = load_file(path)
    except (OSError, SafetensorError) as error:
        print(f"covey: {path} cannot be read as safetensors: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(int(ExitCode.BAD_SCRIPT))
    run(network, find_strategy(os.environ.get("COVEY_FL_STRATEGY", "FedAvg")))


if __name__ == "__main__":
    main()
