"""Collectives of all workers, as a script calls them.

If the world size is 1 and cannot grow, no group is built, and a collective leaves its argument unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from covey.core.parameter_server.settings import ServingSettings
from covey.errors import UsageError
from covey.training.collectives.gloo_group import GlooTransport
from covey.training.collectives.group import Transport
from covey.training.collectives.numbered import NumberedCollectives
from covey.training.collectives.repeatable_operations import AllGather, AllReduce, Broadcast, Mean, Reduction
from covey.training.lazy_torch import torch_module
from covey.training.node_interface import NodeInterface, RankInfo

if TYPE_CHECKING:
    from covey.parameter_server.client import ParameterClient  # imports numpy, which is optional for a script

DEFAULT_TRANSPORT: Final = GlooTransport()
Array = TypeVar("Array")  # a torch tensor or a numpy array


class Communicator:
    """Rank, world size and collectives of this process, and its client of the parameter servers.

    Collectives take torch tensors and numpy arrays of numbers, and raise `UsageError` for other arguments.
    """

    def __init__(
        self,
        context: NodeInterface | None,
        serving_settings: ServingSettings | None = None,
        transport: Transport = DEFAULT_TRANSPORT,
    ) -> None:
        """Set the node and the transport of the collectives.

        `context`: the node of this process; None outside a cluster, where the world size is 1. `serving_settings`: settings of
        the parameter servers; None if there are none.
        """
        self.node_interface = context
        self.serving_settings = serving_settings
        self._transport = transport
        self._collectives: NumberedCollectives | None = None
        self._client: ParameterClient | None = None

    @property
    def assignment(self) -> RankInfo | None:
        """Rank and world size as the script sees them; None outside a cluster. A spare blocks until it has a rank.

        Once `collectives` exists, rank and world size change only in a collective or when a `Loop` is created.
        """
        if self._collectives is not None:
            return self._collectives.assignment
        return self.node_interface.assignment if self.node_interface is not None else None

    @property
    def rank(self) -> int:
        return self.assignment.rank if self.assignment is not None else 0

    @property
    def world(self) -> int:
        if self._collectives is not None:
            return self._collectives.assignment.world
        return self.node_interface.world if self.node_interface is not None else 1

    @property
    def collectives(self) -> NumberedCollectives | None:
        """The numbered collectives, created on first use; None outside a cluster, or if the world size is 1 and cannot grow.

        A spare blocks here until it has a rank.
        """
        if self._collectives is None and self.node_interface is not None and (self.world > 1 or self.node_interface.may_grow):
            self._collectives = NumberedCollectives(self.node_interface, self._transport)
        return self._collectives

    @property
    def client(self) -> ParameterClient:
        """This worker's client of the parameter servers, created on first use; raises `UsageError` if the cluster has no
        servers."""
        if self.serving_settings is None or self.node_interface is None:
            raise UsageError("this cluster has no parameter servers: start it with --servers N, or with MS_SERVER_NUM=N")
        if self._client is None:
            from covey.parameter_server.client import ParameterClient
            from covey.parameter_server.discovery import find_server

            context = self.node_interface
            self._client = ParameterClient(
                self.serving_settings,
                context.assignment.rank,
                lambda: context.assignment.generation,
                functools.partial(find_server, context),
                lambda: context.assignment.sharding,
            )
        return self._client

    def all_reduce(self, array: Array, op: Reduction = "sum") -> Array:
        """Reduce `array` over all ranks in place and return it. Raise `UsageError` if its dtype or `op` is not supported."""
        reduction = AllReduce(_as_tensor(array), op)
        if self.collectives is not None:
            self.collectives.run(reduction)
        return array

    def reduce(self, tensors: Sequence[Any]) -> list[Any]:
        """Average tensors, such as gradients, over all ranks in place, and return them as a list.

        None entries are kept. If there is a group, raise `UsageError` for a dtype that cannot be averaged.
        """
        found = [_as_tensor(tensor) for tensor in tensors if tensor is not None]
        if self.collectives is not None and found:
            self.collectives.run(Mean(found))
        return list(tensors)

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Copy the array of rank `root` to all ranks, in place, and return the array.

        Raise `UsageError` if `root` is not a rank, and `PeerError` if the root left the cluster before it took part.
        """
        tensor = _as_tensor(array)
        if not isinstance(root, int) or not 0 <= root < self.world:
            raise UsageError(f"broadcast(root={root!r}) is invalid: expected a rank from 0 to {self.world - 1}")
        if self.collectives is not None:
            self.collectives.run(Broadcast([tensor], root, self.rank))
        return array

    def all_gather(self, array: Any) -> list[Any]:
        """Return a copy of every rank's array, in rank order. Shapes and dtypes must be equal on all ranks."""
        gather = AllGather(_as_tensor(array))
        if self.collectives is not None:
            self.collectives.run(gather)
        else:
            gather.complete([_as_tensor(array)])
        return [t.numpy() for t in gather.gathered] if _is_numpy(array) else gather.gathered

    def barrier(self) -> None:
        """Block until every rank has called this."""
        self.all_reduce(torch_module().zeros(1))

    def wait_for_all_ranks(self) -> None:
        """Block at the end of the script until every rank has finished; until then this rank can donate its state.

        Do nothing if this process has not used `collectives`.
        """
        if self._collectives is not None:
            self._collectives.wait_for_all_ranks()


def _as_tensor(array: Any) -> Any:
    torch = torch_module()
    if isinstance(array, torch.Tensor):
        return array.detach()
    if _is_numpy(array):
        try:
            return torch.from_numpy(array)
        except (TypeError, ValueError) as error:  # a scalar, strings, a view with negative strides
            cause = " ".join(str(error).split())[:200]
            raise UsageError(f"this {type(array).__name__} cannot be reduced ({cause}): make it an array of numbers") from None
    raise UsageError(f"a collective got a {type(array).__name__}: expected a torch tensor or a numpy array")


def _is_numpy(array: Any) -> bool:
    """Return whether the type of `array` is defined by numpy, without importing numpy."""
    return type(array).__module__.partition(".")[0] == "numpy"
