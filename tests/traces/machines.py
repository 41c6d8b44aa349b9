"""The state machines whose calls are recorded: the only module of `tests/traces` that names classes and methods of covey.

A change that moves or renames a machine changes this table and `renames.json`, not the record.
"""

from __future__ import annotations

from typing import NamedTuple

from covey.core.cluster.node_machine import NodeMachine
from covey.core.cluster.scheduler_machine import SchedulerMachine
from covey.core.federated.federation_machine import FederationMachine
from covey.core.federated.update_claims import Claims


class Recorded(NamedTuple):
    """A class, the word that stands for it in a trace, and its recorded methods: present name to the name in the trace."""

    kind: type
    word: str
    methods: dict[str, str]


def same(*names: str) -> dict[str, str]:
    """Methods that still have the name they have in the record."""
    return {name: name for name in names}


MACHINES = (
    Recorded(SchedulerMachine, "scheduler", same("step")),
    Recorded(NodeMachine, "node", same("step")),
    Recorded(
        FederationMachine,
        "federated scheduler",
        same("step", "restore", "scale_out", "roll_back", "scale_in", "set_enabled") | {"request_new_instance": "new_instance"},
    ),
    Recorded(
        Claims,
        "federated server",
        {
            **same("restore", "tick"),
            "apply_instructions": "follow",
            "holdings_for": "greet",
            "on_update_received": "came",
            "on_update_logged": "logged",
            "on_request_dropped": "dropped",
            "on_store_failed": "failed",
            "on_message": "heard",
        },
    ),
)
