"""A field is written by the class that owns it: training, worker and integrations store to no other object's attributes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from tests.documents import ROOT

MUTATORS = {"append", "add", "discard", "pop", "clear", "remove", "update", "setdefault", "extend", "insert", "popitem", "sort"}
ALLOWED = {  # by module, the target and why its owner is not a class of covey
    "training/collectives/gloo_group.py": {
        "options.reduceOp": "torch's options",
        "options.rootRank": "torch's options",
        "options.rootTensor": "torch's options",
        "options._devices": "torch's options",
        "options._timeout": "torch's options",
    },
    "training/gradient_reducer.py": {"parameter.grad": "torch's parameter"},
    "training/ps_parameters.py": {
        "module.served": "the user's module",
        "module.weight": "the user's module",
        "module.forward": "the user's module",
        "parameter.grad": "torch's parameter",
    },
    "training/sharded_optimizer.py": {
        "self._inner_parameters[number].data": "torch's parameter",
        "self._inner_parameters[number].grad": "torch's parameter",
    },
    "training/state/process_memory.py": {"library.process_vm_readv.restype": "declaration of a C function"},
    "training/state/training_state.py": {"parameter.grad": "torch's parameter"},
    "worker/process_exit.py": {"sys.excepthook": "the interpreter's hook", "sys.exit": "the interpreter's hook"},
    "worker/spare.py": {"os.environ.update": "the process's environment"},
    "worker/container_supervisor.py": {"os.environ": "the process's environment"},
    "integrations/accelerate.py": {
        "os.environ.pop": "the process's environment",
        "os.environ.update": "the process's environment",
        "state.process_index": "Accelerate's state",
        "state.local_process_index": "Accelerate's state",
    },
    "integrations/lightning.py": {
        "rank_zero_only.rank": "Lightning's function",
        "progress.ready": "Lightning's progress",
        "progress.started": "Lightning's progress",
        "progress.processed": "Lightning's progress",
        "progress.completed": "Lightning's progress",
        "steps._batches_that_stepped": "Lightning's loop",
        "fit._loaded_from_state_dict": "Lightning's loop",
        "fit._resuming_from_checkpoint": "Lightning's loop",
        "fit.restarting": "Lightning's loop",
    },
    "integrations/taskd/agent_api.py": {
        "_initialized_roles.agent": "the module's own record",
        "_initialized_roles.agent.pop": "the module's own record",
        "_initialized_roles.rank": "the module's own record",
        "_initialized_roles.has_proxy": "the module's own record",
        "os.environ.update": "the process's environment",
    },
    "integrations/taskd/torchrun_patch.py": {
        "api.launch_agent": "torchrun's module",
        "config.max_restarts": "torchrun's settings",
    },
}


def foreign_writes(source: str) -> Iterator[str]:
    """Return the targets of stores, deletions and mutating calls on attributes of another object than `self`."""
    for node in ast.walk(ast.parse(source)):
        target: ast.AST | None = None
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node if isinstance(node, ast.Attribute) else node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            target = node.func.value
        if not isinstance(target, ast.Attribute):
            continue
        if not (isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")):
            yield ast.unparse(node.func if isinstance(node, ast.Call) else target)


@pytest.mark.parametrize("package", ["training", "worker", "integrations"])
def test_no_class_writes_fields_of_another(package: str) -> None:
    source = ROOT / "src" / "covey"
    found = {
        (str(path.relative_to(source)), target)
        for path in (source / package).rglob("*.py")
        for target in foreign_writes(path.read_text())
    }
    allowed = {(name, target) for name, targets in ALLOWED.items() for target in targets}
    assert found - allowed == set(), "make it a method of the owner, or add it to ALLOWED if no class of covey owns it"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("self.count = 1", []),
        ("count = 1", []),
        ("loop.count = 1", ["loop.count"]),
        ("self._loop.count += 1", ["self._loop.count"]),
        ("del loop.counts[0]", ["loop.counts"]),
        ("loop.counts[0] = 1", ["loop.counts"]),
        ("loop.counts.append(1)", ["loop.counts.append"]),
        ("self.counts.append(1)", []),
        ("a, loop.count = 1, 2", ["loop.count"]),
    ],
)
def test_foreign_writes_finds_stores_to_other_objects(source: str, expected: list[str]) -> None:
    assert list(foreign_writes(source)) == expected
