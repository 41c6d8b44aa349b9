"""Wrong calls of what a program hands parameters over with: each is one sentence, said where it is called."""

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


class Rows:
    """Where rows come from."""

    def fetch_rows(self, table: Embedding, numbers: Array) -> Array:
        return np.repeat(numbers[:, None], table.embedding_size, 1).astype(np.float32)


def table(**options: object) -> Embedding:
    made = Embedding(10, 4, **options)  # type: ignore[arg-type]
    made.attach_to_loop(Rows())
    return made


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no rows": (lambda: Embedding(0, 4), "vocab_size=0"),
    "a word": (lambda: Embedding("10", 4), "vocab_size='10'"),  # type: ignore[arg-type]
    "half a column": (lambda: Embedding(10, 4.5), "embedding_size=4.5"),  # type: ignore[arg-type]
    "too many rows": (lambda: Embedding(1 << 50, 4), "at most 1099511627776 rows"),
    "seed": (lambda: table(seed=1 << 64), "a seed below"),
    "init": (lambda: table(init="ones"), "init='ones'.*normal, uniform, zeros"),
    "scale": (lambda: table(scale="1"), "scale=.*a float or int, not a str"),
    "torch's optimizer": (lambda: table(optimizer=torch.optim.Adam), "optimizer=.*an OptimizerRule, not a type"),
    "no loop": (lambda: Embedding(10, 4)(torch.tensor([1])), "once its model is in a covey.Loop"),
    "a list": (lambda: table()([1, 2]), "ids=.*a Tensor, not a list"),
    "fractions": (lambda: table()(torch.tensor([1.5])), "ids of torch.float32 came"),
    "a mask": (lambda: table()(torch.tensor([True])), "ids of torch.bool came"),
    "no cache": (lambda: table().prefetch(torch.tensor([1])), "give Embedding a vocab_cache_size"),
    "prefetch beyond": (lambda: table(vocab_cache_size=4).prefetch(torch.tensor([3, 10])), "row 10 does not exist"),
    "prefetch below": (lambda: table(vocab_cache_size=4).prefetch(torch.tensor([3, -1])), "row -1 does not exist"),
    "marking a tensor": (lambda: mark_all(torch.ones(3)), "a torch module or parameter, not a Tensor"),
    "marking bfloat16": (lambda: mark_all(torch.nn.Linear(2, 2).bfloat16()), "is bfloat16, which cannot be served"),
    "marking meta": (lambda: mark_all(torch.nn.Linear(2, 2, device="meta")), "meta device"),
    "marking after the loop": (lambda: mark_all(in_loop(torch.nn.Linear(2, 2))), "too late .* before Loop"),
    "marking one after the loop": (lambda: mark_all(in_loop(torch.nn.Linear(2, 2)).weight), "too late .* before Loop"),
    "marking a table after the loop": (lambda: mark_all(table_of_torch()), "too late .* before Loop"),
    "marking with a word": (lambda: mark_all(torch.nn.Linear(2, 2), "adam"), "optimizer=.*an OptimizerRule, not a str"),
}


def mark_all(target: object, optimizer: object = None) -> None:
    mark_for_server(target, recurse=True, init_in_server=False, optimizer=optimizer)  # type: ignore[arg-type]


def in_loop(model: torch.nn.Module) -> torch.nn.Linear:
    """As a loop in a cluster with servers leaves it, here without one that is served."""
    group = Communicator(None, ServingSettings(1, 1))
    ServedParameters(model, torch.optim.SGD(model.parameters(), 0.1), group)
    assert isinstance(model, torch.nn.Linear)
    return model


def table_of_torch() -> torch.nn.Module:
    """A torch.nn.Embedding that a loop has taken: it has no parameter here."""
    made = torch.nn.Embedding(10, 4)
    move_embedding_to_servers(made, None)
    inner = made.served
    assert isinstance(inner, Embedding)
    inner.attach_to_loop(Rows())
    return made


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_one_sentence(name: str) -> None:
    call, sentence = WRONG[name]
    with pytest.raises(UsageError, match=sentence):
        call()


def test_ids_of_any_whole_numbers_and_any_shape() -> None:
    made = table(optimizer=SGD(0.1))
    for ids in (torch.tensor([[1, 2], [2, 1]], dtype=torch.int32), torch.tensor(3), torch.empty(0, dtype=torch.long)):
        found = made(ids)
        assert torch.equal(found, ids[..., None].expand(*ids.shape, 4).float())


def test_a_step_is_pushed_once_unless_it_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(UsageError, match="may step once in each step"):
        served.push(None)
    served.discard_gradients()
    served.push(None)
    served.pull_for_step(1)
    served.push(None)


class CountingGroup:
    """A group that counts what is issued."""

    def __init__(self, generation: int) -> None:
        self.generation, self.all_reduces = generation, 0

    def all_reduce(self, tensor: object, op: ReduceOp) -> object:
        self.all_reduces += 1
        return object()


class CollectivesOnGroups:
    """Issues each push on the group of the present generation."""

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
