"""The group of all workers: what a program calls. In a world of one every collective is the identity, and no group is
made unless others may come."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from covey.core.parameter_server.settings import ServingSettings
from covey.errors import UsageError
from covey.training.collectives.gloo_group import GlooTransport
from covey.training.collectives.group import Transport
from covey.training.collectives.numbered import NumberedCollectives
from covey.training.collectives.operations import AllGather, AllReduce, Broadcast, Mean, Reduction
from covey.training.lazy_torch import torch_module
from covey.training.worker_context import RankInfo, WorkerContext

if TYPE_CHECKING:
    from covey.parameter_server.client import ParameterClient  # it imports numpy, which a program may do without

DEFAULT_TRANSPORT: Final = GlooTransport()
Array = TypeVar("Array")  # a torch tensor or a numpy array


class Communicator:
    """Collectives on torch tensors and numpy arrays."""

    def __init__(
        self,
        context: WorkerContext | None,
        serving_settings: ServingSettings | None = None,
        transport: Transport = DEFAULT_TRANSPORT,
    ) -> None:
        """`serving_settings`: how parameters are served; None if there are no parameter servers."""
        self.worker_context = context
        self.serving_settings = serving_settings
        self._transport = transport
        self._collectives: NumberedCollectives | None = None
        self._client: ParameterClient | None = None

    @property
    def assignment(self) -> RankInfo | None:
        """Where this rank stands, for the program: it changes only inside a collective. None in a program on its own."""
        if self._collectives is not None:
            return self._collectives.assignment
        return self.worker_context.assignment if self.worker_context is not None else None

    @property
    def rank(self) -> int:
        return self.assignment.rank if self.assignment is not None else 0

    @property
    def world(self) -> int:
        if self._collectives is not None:
            return self._collectives.assignment.world
        return self.worker_context.world if self.worker_context is not None else 1

    @property
    def collectives(self) -> NumberedCollectives | None:
        """None in a world of one that stays so."""
        if self._collectives is None and self.worker_context is not None and (self.world > 1 or self.worker_context.may_grow):
            self._collectives = NumberedCollectives(self.worker_context, self._transport)
        return self._collectives

    @property
    def client(self) -> ParameterClient:
        """This worker's way to the parameter servers."""
        if self.serving_settings is None or self.worker_context is None:
            raise UsageError("this cluster has no parameter servers: start it with --servers N, or with MS_SERVER_NUM=N")
        if self._client is None:
            from covey.parameter_server.client import ParameterClient
            from covey.parameter_server.discovery import find_server

            context = self.worker_context
            self._client = ParameterClient(
                self.serving_settings,
                context.assignment.rank,
                lambda: context.assignment.generation,
                functools.partial(find_server, context),
                lambda: context.assignment.sharding,
            )
        return self._client

    def all_reduce(self, array: Array, op: Reduction = "sum") -> Array:
        """Reduce over all ranks, in place, and return the array."""
        reduction = AllReduce(_as_tensor(array), op)
        if self.collectives is not None:
            self.collectives.run(reduction)
        return array

    def reduce(self, tensors: Sequence[Any]) -> list[Any]:
        """The mean of gradients over all ranks, in place: what stands between the backward pass and the optimizer."""
        found = [_as_tensor(tensor) for tensor in tensors if tensor is not None]
        if self.collectives is not None and found:
            self.collectives.run(Mean(found))
        return list(tensors)

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """The root's values for everyone, in place."""
        tensor = _as_tensor(array)
        if not isinstance(root, int) or not 0 <= root < self.world:
            raise UsageError(f"broadcast from rank {root} is not possible: ranks go from 0 to {self.world - 1}")
        if self.collectives is not None:
            self.collectives.run(Broadcast([tensor], root, self.rank))
        return array

    def all_gather(self, array: Any) -> list[Any]:
        """Every rank's array, in order of rank. Shapes and dtypes must agree."""
        gathering = AllGather(_as_tensor(array))
        if self.collectives is not None:
            self.collectives.run(gathering)
        else:
            gathering.complete([_as_tensor(array)])
        return [t.numpy() for t in gathering.gathered] if _is_numpy(array) else gathering.gathered

    def barrier(self) -> None:
        """Return when every rank is here."""
        self.all_reduce(torch_module().zeros(1))

    def wait_for_all_ranks(self) -> None:
        """The program is at its end: stay until every rank is, to help one that died in its last step."""
        if self._collectives is not None:
            self._collectives.wait_for_all_ranks()


def _as_tensor(array: Any) -> Any:
    torch = torch_module()
    if isinstance(array, torch.Tensor):
        return array.detach()
    if _is_numpy(array):
        try:
            return torch.from_numpy(array)
        except (TypeError, ValueError) as error:  # a single number, texts, a view that runs backwards
            what = " ".join(str(error).split())[:200]
            raise UsageError(f"this {type(array).__name__} cannot be reduced ({what}): make it an array of numbers") from None
    raise UsageError(f"collectives take torch tensors and numpy arrays, not {type(array).__name__}")


def _is_numpy(array: Any) -> bool:
    """numpy is not imported to find out that something is not numpy's."""
    return type(array).__module__.partition(".")[0] == "numpy"
