"""covey uses its own random generators; the default generators of random, numpy and torch belong to the script."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import covey

SOURCE = Path(covey.__file__).parent

# Classes and functions that create a generator or name its type. All other members of these modules use the script's generator.
MAKERS = {
    "random": {"Random", "SystemRandom"},
    "numpy.random": {"BitGenerator", "Generator", "PCG64", "SeedSequence", "default_rng"},
}
# Members of torch that use or change the default generator. Functions of the first group accept `generator=`.
TORCH_DRAWS = {
    "bernoulli", "multinomial", "normal", "poisson",
    "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
}  # fmt: skip
TORCH_STATE = {
    "default_generator",
    "get_rng_state",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "random",
    "seed",
    "set_rng_state",
}
FILLS = {
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
}  # tensors' methods

ALLOWED = {
    "training/seeding.py": "the Loop seeds the program's generators by (seed, step, micro-batch, rank), as documented, and"
    " covey.set_seed because the program asks for it",
    "template_process/child_bootstrap.py": "a forked child gets fresh generators before the first line, as `python` gives it",
}


def uses(source: str) -> list[str]:
    """Return each use of the script's generators in this source, as `line: expression`."""
    tree = ast.parse(source)
    names = {"torch": "torch", "torch_module()": "torch"}  # module by name, or by the call that imports torch lazily
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = whole
                if _is_the_programs(whole, passes_generator=False):
                    found.append((node.lineno, whole))
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            call = calls.get(id(node))
            passes = call is not None and any(keyword.arg == "generator" for keyword in call.keywords)
            text = ast.unparse(node)
            base = ast.unparse(node.value)
            first, dot, rest = base.partition(".")
            whole = f"{names.get(first, first)}{dot}{rest}.{node.attr}"
            if _is_the_programs(whole, passes_generator=passes) or (node.attr in FILLS and not passes):
                found.append((node.lineno, text))
        elif isinstance(node, ast.Constant) and node.value in MAKERS:
            found.append((node.lineno, repr(node.value)))  # sys.modules["random"], importlib.import_module("numpy.random")
    return [f"{line}: {text}" for line, text in sorted(found)]


def _is_the_programs(whole: str, *, passes_generator: bool) -> bool:
    module, _, member = whole.rpartition(".")
    if module in MAKERS:
        return member not in MAKERS[module]
    if module == "torch" and member in TORCH_DRAWS:
        return not passes_generator
    return module in ("torch", "torch.cuda", "torch.random", "torch.default_generator") and member in TORCH_STATE


def test_covey_does_not_use_default_generators() -> None:
    found = {str(path.relative_to(SOURCE)): uses(path.read_text()) for path in SOURCE.rglob("*.py")}
    using = {name: lines for name, lines in found.items() if lines}
    assert not {name: lines for name, lines in using.items() if name not in ALLOWED}, "use a separate random.Random"
    assert using.keys() == ALLOWED.keys(), "remove the unused exception from ALLOWED"


@pytest.mark.parametrize(
    "source",
    [
        "import random\nrandom.random()",
        "import random as r\nf(jitter=r.random)",
        "from random import uniform",
        "import numpy as np\nnp.random.seed(1)",
        "import numpy\nnumpy.random.rand(2)",
        "from numpy import random\nrandom.shuffle(x)",
        "from numpy.random import rand",
        "import torch\ntorch.randperm(4)",
        "import torch\ntorch.manual_seed(1)",
        "import torch\ntorch.cuda.manual_seed_all(1)",
        "import torch\ntorch.default_generator.seed()",
        "torch_module().rand(2)",
        "tensor.normal_()",
        "import sys\nsys.modules.get('random').seed()",
    ],
)
def test_use_of_default_generator_is_found(source: str) -> None:
    assert uses(source)


@pytest.mark.parametrize(
    "source",
    [
        "import random\nrandom.Random().random()",
        "import numpy as np\ndraw: np.random.Generator = np.random.default_rng(1)\ndraw.random()",
        "import torch\ntorch.randperm(4, generator=torch.Generator().manual_seed(1))",
        "tensor.normal_(generator=own)",
        "import secrets\nsecrets.token_hex(4)",
    ],
)
def test_use_of_separate_generator_is_allowed(source: str) -> None:
    assert not uses(source)
