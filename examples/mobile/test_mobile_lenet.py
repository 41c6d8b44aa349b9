"""The script that every role of the cluster runs: options become the context, and `run` becomes what `ms_role` says."""

import argparse

from src.model import lenet5

import covey
import covey.federated
from covey.federated.context import KEYS


def a_bool(text):
    """How a shell says yes and no."""
    return text.lower() in ("1", "true", "yes")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--device_target", default="CPU", help="accepted, and without effect: servers add models on the CPU")
for name, key in KEYS.items():
    kind = a_bool if isinstance(key.default, bool) else type(key.default)
    parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=f"{key.allowed} ({key.default!r})")

options = vars(parser.parse_args())
options.pop("device_target")
covey.set_fl_context(**{"enable_fl": True, **options})
covey.federated.run(lenet5())
