"""Gradients: averaged over all ranks while the backward pass still runs.

The parameters are cut into buckets by their order alone, because the bits of a sum depend on where an element lies. A hook
copies each finished gradient, times this rank's part of the samples, into its bucket and issues full buckets in order;
autograd's end of the backward pass waits for them and copies the result back. The local gradients stay intact until then, so a
reduction that a death interrupted is repeated from them; and the result is kept, untouched by clipping, for a rank that missed
it.

Buffers (batch norm's statistics) travel in the last bucket: rank 0's values from rank 0, nothing from the others.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from covey.errors import UsageError
from covey.training.collectives.group import Group, ReduceOp, Work
from covey.training.collectives.numbered import NumberedCollectives
from covey.training.lazy_torch import torch_module
from covey.training.state.training_state import ModelBuffers

FIRST_BUCKET_BYTES: Final = 1 << 20
BUCKET_BYTES: Final = 25 << 20
SERVED_ATTRIBUTE: Final = "covey_served"  # marks a parameter whose gradients go to the parameter servers


class Bucket:
    """Some parameters, and where each lies in the flat buffer."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters
        self.offsets: list[int] = []
        self._flags_start = 0  # from here on, one number for each parameter: whether any rank has a gradient of it
        for parameter in parameters:
            self.offsets.append(self._flags_start)
            self._flags_start += parameter.numel()
        self._missing_gradients = len(parameters)

    @property
    def is_full(self) -> bool:
        """Whether every parameter's gradient has been counted in this backward pass."""
        return self._missing_gradients == 0

    def count_gradient(self) -> None:
        self._missing_gradients -= 1

    def begin_backward(self) -> None:
        self._missing_gradients = len(self.parameters)

    def allocate_flat(self) -> Any:
        """Memory for all of its gradients."""
        first = self.parameters[0]
        return torch_module().empty(self._flags_start + len(self.parameters), dtype=first.dtype, device=first.device)

    def copy_gradients_in(self, flat: Any, parts: list[Any], scale: float) -> None:
        """This rank's gradients, as far as it has them."""
        torch = torch_module()
        marks = flat[self._flags_start :]
        marks.fill_(1)
        for number, (parameter, part) in enumerate(zip(self.parameters, parts, strict=True)):
            if parameter.grad is None:
                part.zero_()
                marks[number] = 0
            elif parameter.grad.layout != torch.strided:
                raise UsageError(
                    f"a parameter of shape {list(parameter.shape)} has a sparse gradient, which is not averaged: make it with"
                    " sparse=False, or a covey.Embedding on parameter servers"
                )
            else:
                torch.mul(parameter.grad, scale, out=part)

    def copy_gradients_out(self, flat: Any, parts: list[Any]) -> None:
        """Give the sums to the parameters. One that nobody has a gradient of keeps none, as if it were trained alone."""
        torch = torch_module()
        if any(parameter.grad is None for parameter in self.parameters):
            for parameter, mark in zip(self.parameters, flat[self._flags_start :].tolist(), strict=True):
                if parameter.grad is None and mark:
                    parameter.grad = torch.empty_like(parameter)
        pairs = [(p.grad, part) for p, part in zip(self.parameters, parts, strict=True) if p.grad is not None]
        if pairs:
            torch._foreach_copy_(*(list(side) for side in zip(*pairs, strict=True)))

    def gradient_views(self, flat: Any) -> list[Any]:
        """Where each parameter's gradient lies in it."""
        places = zip(self.parameters, self.offsets, strict=True)
        return [flat[offset : offset + parameter.numel()].view_as(parameter) for parameter, offset in places]


def make_buckets(parameters: Iterable[Any]) -> list[Bucket]:
    """Buckets by registration order reversed, as gradients come; a dtype or device change begins a new one."""
    buckets: list[list[Any]] = []
    filled, limit = 0, FIRST_BUCKET_BYTES
    for parameter in reversed(list(parameters)):
        size = parameter.numel() * parameter.element_size()
        fits = buckets and filled + size <= limit and _dtype_and_device(buckets[-1][0]) == _dtype_and_device(parameter)
        if not fits:
            limit = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += size
    return [Bucket(found) for found in buckets]


class SampleWeights(Protocol):
    """Who holds how many of a step's samples: the loop knows."""

    def gradient_scale(self) -> float:
        """What this rank's gradients count for among those of all who take part now."""

    def participants_tensor(self) -> Any:
        """Who takes part now, as a tensor: it stays with the result, for who is handed it."""

    def on_reduction_complete(self, present: Any) -> None:
        """The reduction is complete: this is who took part in it."""


class GradientReducer:
    """The hooks of one model. `ends_step` says whether this backward pass ends a step."""

    def __init__(
        self, model: Any, collectives: NumberedCollectives, *, weights: SampleWeights, ends_step: Callable[[], bool]
    ) -> None:
        self._parameters = [p for p in model.parameters() if not hasattr(p, SERVED_ATTRIBUTE)]
        self._trainable: list[Any] = []
        self._buckets: list[Bucket] = []
        self._free_buffers: collections.deque[FlatBuffers] = collections.deque([{}, {}])  # the kept one, and the one before it
        self._bucket_by_parameter: dict[int, Bucket] = {}
        self._hooked_ids: set[int] = set()
        self._model_buffers = ModelBuffers(model)
        self._collectives = collectives
        self._sample_weights = weights
        self._ends_step = ends_step
        self._reduction: GradientReduction | None = None
        self._first_of_step = True
        self._update_buckets()

    def _update_buckets(self) -> None:
        """Cut buckets of what is trained from now on: a program may freeze and unfreeze parameters on its way."""
        trained = [p for p in self._parameters if p.requires_grad]
        if len(trained) == len(self._trainable) and all(p is q for p, q in zip(trained, self._trainable, strict=True)):
            return
        self._trainable = trained
        self._buckets = make_buckets(trained)
        self._free_buffers = collections.deque([{}, {}])
        self._bucket_by_parameter = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        for parameter in trained:
            if id(parameter) not in self._hooked_ids:
                self._hooked_ids.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._on_gradient_ready)

    def begin_step(self) -> None:
        """The first reduction of a step uses memory again; further ones may not, their step's results are all kept."""
        self._first_of_step = True
        self._update_buckets()

    def begin_micro_batch(self) -> None:
        """A backward pass that failed, and was forgiven by the program, left a reduction behind: it must not be built upon."""
        if self._reduction is not None:
            self._reduction = None
            if self._first_of_step:
                self._free_buffers.appendleft({})  # the abandoned group may still write to what was taken
            self._collectives.abort_generation("a backward pass failed")
            for bucket in self._buckets:
                bucket.begin_backward()

    def _on_gradient_ready(self, parameter: Any) -> None:
        if not self._ends_step():
            return
        if self._reduction is None:
            self._update_buckets()
            free = self._free_buffers.popleft() if self._first_of_step else {}
            buffers = [buffer for buffer in self._model_buffers.current_buffers().values() if buffer.numel()]
            self._reduction = GradientReduction(self._buckets, buffers, self._sample_weights, free)
            torch_module().autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        bucket = self._bucket_by_parameter[id(parameter)]
        bucket.count_gradient()  # one that was unfrozen in this pass may never be counted: its bucket is issued at the end
        if bucket.is_full:
            self._collectives.issue_ahead(self._reduction.issue_full_buckets)

    def _on_backward_end(self) -> None:
        """The end of the backward pass: autograd calls this before `backward()` returns."""
        reduction, self._reduction = self._reduction, None
        assert reduction is not None
        try:
            self._collectives.run(reduction, limited=not self._first_of_step)  # the first is needed at any size
            if self._first_of_step:
                self._free_buffers.append(reduction.filled_buffers)
            self._first_of_step = False
        finally:
            for bucket in self._buckets:
                bucket.begin_backward()


FlatBuffers = dict[int, tuple[Any, list[Any]]]  # by the bucket's number: a flat buffer and its parts


class GradientReduction:
    """One step's reduction, as a collective that can be issued again on another group.

    `free` are the flat buffers of the step before the last: using memory again is cheaper than allocating it.
    """

    def __init__(self, buckets: list[Bucket], buffers: list[Any], weights: SampleWeights, free: FlatBuffers) -> None:
        self.filled_buffers: FlatBuffers = {}
        self._buckets = buckets
        self._model_buffers = buffers
        self._sample_weights = weights
        self._free_buffers = free
        self._group: Group | None = None
        self._flats: list[Any] = []
        self._results: list[Any] = []
        self._works: list[Work] = []

    def issue_full_buckets(self, group: Group) -> None:
        """Issue the buckets that are full, in order, while the backward pass goes on."""
        self._reset_for_group(group)
        while len(self._flats) < len(self._buckets) and self._buckets[len(self._flats)].is_full:
            self._issue_next_bucket(group)

    def issue(self, group: Group) -> list[Work]:
        """Issue whatever has not been issued on this group yet; a gradient that this rank does not have counts as zero."""
        self._reset_for_group(group)
        while len(self._flats) < len(self._buckets):
            self._issue_next_bucket(group)
        if self._model_buffers and len(self._flats) == len(self._buckets):
            for flat in self._pack_buffers(group.rank):
                self._issue_flat(group, flat)
        return self._works

    def results(self) -> list[Any]:
        self._results = [*self._flats, self._sample_weights.participants_tensor()]
        return self._results

    def complete(self, results: list[Any]) -> None:
        """Copy back: what is kept must stay as it is, and the program will clip and unscale what it is given."""
        if results is not self._results:  # handed over: what was issued here is an abandoned group's, which may write to it
            self.filled_buffers = {}
        *flats, present = results
        self._sample_weights.on_reduction_complete(present)
        for number, (bucket, flat) in enumerate(zip(self._buckets, flats, strict=False)):
            bucket.copy_gradients_out(
                flat, self.filled_buffers[number][1] if self.filled_buffers else bucket.gradient_views(flat)
            )
        self._unpack_buffers(flats[len(self._buckets) :])

    def _reset_for_group(self, group: Group) -> None:
        if self._group is not group:
            if self._group is not None:
                self._free_buffers = {}  # the abandoned group may still write there
            self._group, self._flats, self._works, self.filled_buffers = group, [], [], {}

    def _issue_next_bucket(self, group: Group) -> None:
        number = len(self._flats)
        bucket = self._buckets[number]
        flat, parts = self._free_buffers.get(number) or (None, [])
        if flat is None:
            flat = bucket.allocate_flat()
            parts = bucket.gradient_views(flat)
        self.filled_buffers[number] = (flat, parts)
        bucket.copy_gradients_in(flat, parts, self._sample_weights.gradient_scale())
        self._issue_flat(group, flat)

    def _issue_flat(self, group: Group, flat: Any) -> None:
        self._flats.append(flat)
        self._works.append(group.all_reduce(flat, ReduceOp.SUM))

    def _pack_buffers(self, rank: int) -> list[Any]:
        """Rank 0's buffers, zeros from the others: their sum is rank 0's, bit for bit. As bytes, so of any dtype."""
        torch = torch_module()
        flat = torch.cat([b.detach().reshape(-1).view(torch.uint8) for b in self._model_buffers])
        return [flat if rank == 0 else torch.zeros_like(flat)]

    def _unpack_buffers(self, flats: list[Any]) -> None:
        torch = torch_module()
        offset = 0
        for buffer in self._model_buffers if flats else []:
            size = buffer.numel() * buffer.element_size()
            part = flats[0][offset : offset + size].clone().view(buffer.dtype).view_as(buffer)
            with torch.no_grad():
                buffer.copy_(part)
            offset += size


def _dtype_and_device(parameter: Any) -> tuple[Any, Any]:
    return (parameter.dtype, parameter.device)
