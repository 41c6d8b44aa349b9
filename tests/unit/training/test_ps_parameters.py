"""Served parameters and `covey.Embedding`: wrong calls, and pushes of gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from covey.core.parameter_server.settings import ServingSettings
from covey.errors import UsageError
from covey.parameter_server.client import ParameterClient
from covey.parameter_server.discovery import ServerEndpoint
from covey.parameter_server.optimizers import SGD, Array
from covey.parameter_server.server import ParameterServer
from covey.training.collectives.communicator import Communicator
from covey.training.collectives.group import ReduceOp
from covey.training.embedding import Embedding
from covey.training.ps_parameters import PushCollective, ServedParameters, mark_for_server, move_embedding_to_servers


class FakeRowSource:
    """Returns rows whose values are their numbers."""

    def fetch_rows(self, table: Embedding, numbers: Array) -> Array:
        return np.repeat(numbers[:, None], table.embedding_size, 1).astype(np.float32)


def table(**options: object) -> Embedding:
    embedding = Embedding(10, 4, **options)  # type: ignore[arg-type]
    embedding.attach_to_loop(FakeRowSource())
    return embedding


WRONG_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "vocab_size of 0": (lambda: Embedding(0, 4), "vocab_size=0"),
    "vocab_size as string": (lambda: Embedding("10", 4), "vocab_size='10'"),  # type: ignore[arg-type]
    "embedding_size as float": (lambda: Embedding(10, 4.5), "embedding_size=4.5"),  # type: ignore[arg-type]
    "too many rows": (lambda: Embedding(1 << 50, 4), "the limits are 1099511627776 rows"),
    "seed too large": (lambda: table(seed=1 << 64), "a seed below"),
    "unknown init": (lambda: table(init="ones"), "init='ones'.*normal, uniform, zeros"),
    "scale as string": (lambda: table(scale="1"), "scale=.*a float or int, got str"),
    "torch's optimizer": (lambda: table(optimizer=torch.optim.Adam), "optimizer=.*an OptimizerRule, got type"),
    "lookup without a loop": (lambda: Embedding(10, 4)(torch.tensor([1])), "used outside a loop"),
    "ids as list": (lambda: table()([1, 2]), "ids=.*a Tensor, got list"),
    "ids as floats": (lambda: table()(torch.tensor([1.5])), "ids of torch.float32 are invalid"),
    "ids as mask": (lambda: table()(torch.tensor([True])), "ids of torch.bool are invalid"),
    "prefetch without cache": (lambda: table().prefetch(torch.tensor([1])), "with a vocab_cache_size above 0"),
    "prefetch beyond the rows": (lambda: table(vocab_cache_size=4).prefetch(torch.tensor([3, 10])), "row 10 does not exist"),
    "prefetch of a negative row": (lambda: table(vocab_cache_size=4).prefetch(torch.tensor([3, -1])), "row -1 does not exist"),
    "mark a tensor": (lambda: mark_all(torch.ones(3)), "got a Tensor: expected a torch module or parameter"),
    "mark bfloat16": (lambda: mark_all(torch.nn.Linear(2, 2).bfloat16()), "is bfloat16, which cannot be served"),
    "mark on the meta device": (lambda: mark_all(torch.nn.Linear(2, 2, device="meta")), "meta device"),
    "mark a module in a loop": (lambda: mark_all(in_loop(torch.nn.Linear(2, 2))), "too late .* before Loop"),
    "mark a parameter in a loop": (lambda: mark_all(in_loop(torch.nn.Linear(2, 2)).weight), "too late .* before Loop"),
    "mark a table in a loop": (lambda: mark_all(table_in_loop()), "too late .* before Loop"),
    "mark with a string": (lambda: mark_all(torch.nn.Linear(2, 2), "adam"), "optimizer=.*an OptimizerRule, got str"),
}


def mark_all(target: object, optimizer: object = None) -> None:
    mark_for_server(target, recurse=True, init_in_server=False, optimizer=optimizer)  # type: ignore[arg-type]


def in_loop(model: torch.nn.Module) -> torch.nn.Linear:
    """Return the model as a loop in a cluster with servers leaves it; none of its parameters is served."""
    group = Communicator(None, ServingSettings(1, 1))
    ServedParameters(model, torch.optim.SGD(model.parameters(), 0.1), group)
    assert isinstance(model, torch.nn.Linear)
    return model


def table_in_loop() -> torch.nn.Module:
    """Return a torch.nn.Embedding that a loop has converted: it has no local parameter."""
    module = torch.nn.Embedding(10, 4)
    move_embedding_to_servers(module, None)
    inner = module.served
    assert isinstance(inner, Embedding)
    inner.attach_to_loop(FakeRowSource())
    return module


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_call_raises_usage_error(name: str) -> None:
    call, message = WRONG_CALLS[name]
    with pytest.raises(UsageError, match=message):
        call()


def test_embedding_accepts_ids_of_any_integer_dtype_and_shape() -> None:
    embedding = table(optimizer=SGD(0.1))
    for ids in (torch.tensor([[1, 2], [2, 1]], dtype=torch.int32), torch.tensor(3), torch.empty(0, dtype=torch.long)):
        found = embedding(ids)
        assert torch.equal(found, ids[..., None].expand(*ids.shape, 4).float())


def test_second_push_in_a_step_is_refused_unless_gradients_were_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = ServingSettings(1, 1, copies=0)

    def find(rank: int) -> ServerEndpoint:
        return server.endpoint

    server = ParameterServer("127.0.0.1", serving, 0, 0, find)
    server.recover()
    client = ParameterClient(serving, 0, lambda: 1, find)
    monkeypatch.setattr(Communicator, "client", property(lambda group: client))
    model = torch.nn.Linear(2, 2)
    mark_all(model)
    served = ServedParameters(model, torch.optim.SGD(model.parameters(), 0.1), Communicator(None))
    served.declare(0)
    served.pull_for_step(0)
    served.push(None)
    with pytest.raises(UsageError, match="may step only once per step"):
        served.push(None)
    served.discard_gradients()
    served.push(None)
    served.pull_for_step(1)
    served.push(None)


class CountingGroup:
    """A group that counts all_reduces."""

    def __init__(self, generation: int) -> None:
        self.generation, self.all_reduces = generation, 0

    def all_reduce(self, tensor: object, op: ReduceOp) -> object:
        self.all_reduces += 1
        return object()


class CollectivesOnGroups:
    """Issues each push on the current group."""

    def __init__(self) -> None:
        self.group = CountingGroup(1)

    def run(self, push: PushCollective) -> None:
        push.issue(self.group)  # type: ignore[arg-type]


def test_first_push_of_each_generation_depends_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        serving = ServingSettings(1, 2)

        def push(self, *_: object) -> object:
            return object()

    monkeypatch.setattr(Communicator, "client", property(lambda group: Client()))
    model = torch.nn.Linear(2, 2)
    mark_all(model)
    served = ServedParameters(model, torch.optim.SGD(model.parameters(), 0.1), Communicator(None))
    collectives = CollectivesOnGroups()
    counts = []
    for generation in (1, 1, 2, 2, 5):
        if generation != collectives.group.generation:
            collectives.group = CountingGroup(generation)
        served.discard_gradients()
        served.push(collectives)  # type: ignore[arg-type]
        counts.append(collectives.group.all_reduces)
    assert counts == [1, 1, 1, 1, 1]
