"""The script of every role in the cluster: its options set the context, and `ms_role` selects the role that `run` executes."""

import argparse

from src.model import lenet5

import covey
import covey.federated
from covey.federated.context import KEYS, from_text

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--device_target", default="CPU", help="accepted without effect: servers aggregate on the CPU")
for name, key in KEYS.items():
    parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=f"{key.allowed} ({key.default!r})")

options = vars(parser.parse_args())
options.pop("device_target")
covey.set_fl_context(enable_fl=True)
try:
    covey.set_fl_context(**{name: from_text(name, text) for name, text in options.items()})
except covey.CoveyError as error:
    parser.exit(error.exit_code, f"covey: {error}\n")
covey.federated.run(lenet5())
