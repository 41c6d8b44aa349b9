"""Averaging of gradients over all ranks, overlapped with the backward pass.

Gradients are grouped into buckets that do not depend on when gradients become ready, because the bits of a sum depend on an
element's position. In the backward pass of a step's last micro-batch, the gradients of a complete bucket are scaled by this
rank's share of the samples, copied into a flat buffer and summed over all ranks. At the end of the pass the sums are copied
into `.grad`; until then local gradients are unchanged, so an interrupted reduction can be repeated. Model buffers (batch norm's
statistics) get rank 0's values in the last all_reduce. Parameters on parameter servers are not reduced here.
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
    """Parameters whose gradients are reduced together, and their offsets in the flat buffer, in elements.

    In the flat buffer the gradients are followed by one flag per parameter: before the reduction 1 if this rank has a gradient,
    else 0; after it non-zero if any rank has one.
    """

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters
        self.offsets: list[int] = []
        self._flags_start = 0  # index of the first flag
        for parameter in parameters:
            self.offsets.append(self._flags_start)
            self._flags_start += parameter.numel()
        self._missing_gradients = len(parameters)

    @property
    def is_full(self) -> bool:
        """Whether the gradients of all parameters have been counted in this backward pass."""
        return self._missing_gradients == 0

    def count_gradient(self) -> None:
        self._missing_gradients -= 1

    def begin_backward(self) -> None:
        self._missing_gradients = len(self.parameters)

    def allocate_flat(self) -> Any:
        """Return an uninitialized buffer for the gradients and the flags."""
        first = self.parameters[0]
        return torch_module().empty(self._flags_start + len(self.parameters), dtype=first.dtype, device=first.device)

    def copy_gradients_in(self, flat: Any, parts: list[Any], scale: float) -> None:
        """Copy this rank's gradients into `flat`, multiplied by `scale`; a missing gradient becomes zeros and a zero flag.

        `parts` are the `gradient_views` of `flat`. Raise `UsageError` for a sparse gradient.
        """
        torch = torch_module()
        flags = flat[self._flags_start :]
        flags.fill_(1)
        for number, (parameter, part) in enumerate(zip(self.parameters, parts, strict=True)):
            if parameter.grad is None:
                part.zero_()
                flags[number] = 0
            elif parameter.grad.layout != torch.strided:
                raise UsageError(
                    f"the gradient of a parameter of shape {list(parameter.shape)} is sparse and cannot be averaged: use"
                    " sparse=False, or a covey.Embedding on parameter servers"
                )
            else:
                torch.mul(parameter.grad, scale, out=part)

    def copy_gradients_out(self, flat: Any, parts: list[Any]) -> None:
        """Copy the sums from `flat` into `.grad`; `parts` are the `gradient_views` of `flat`.

        A missing `.grad` is created if another rank has a gradient of the parameter, otherwise it stays None.
        """
        torch = torch_module()
        if any(parameter.grad is None for parameter in self.parameters):
            for parameter, flag in zip(self.parameters, flat[self._flags_start :].tolist(), strict=True):
                if parameter.grad is None and flag:
                    parameter.grad = torch.empty_like(parameter)
        pairs = [(p.grad, part) for p, part in zip(self.parameters, parts, strict=True) if p.grad is not None]
        if pairs:
            torch._foreach_copy_(*(list(side) for side in zip(*pairs, strict=True)))

    def gradient_views(self, flat: Any) -> list[Any]:
        """Return for each parameter the part of `flat` that holds its gradient, as a view in the parameter's shape."""
        pairs = zip(self.parameters, self.offsets, strict=True)
        return [flat[offset : offset + parameter.numel()].view_as(parameter) for parameter, offset in pairs]


def make_buckets(parameters: Iterable[Any]) -> list[Bucket]:
    """Return the parameters in buckets, in reverse order: about the order in which gradients become ready.

    A parameter starts a new bucket if it would exceed the limit (`FIRST_BUCKET_BYTES`, then `BUCKET_BYTES`), or if its dtype or
    device differs from that of the bucket.
    """
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
    """This rank's share of the samples of the current step; implemented by `DataCursor`."""

    def gradient_scale(self) -> float:
        """Return the factor of this rank's gradients in the sum over all ranks."""

    def participants_tensor(self) -> Any:
        """Return a tensor that identifies the participating members; it is cached with the result."""

    def on_reduction_complete(self, participants: Any) -> None:
        """Record the members that took part in the completed reduction; `participants` is its `participants_tensor`."""


class GradientReducer:
    """Gradient hooks of one model; `ends_step` returns whether the current micro-batch is the last of its step."""

    def __init__(
        self, model: Any, collectives: NumberedCollectives, *, weights: SampleWeights, ends_step: Callable[[], bool]
    ) -> None:
        self._parameters = [p for p in model.parameters() if not hasattr(p, SERVED_ATTRIBUTE)]
        self._trainable: list[Any] = []
        self._buckets: list[Bucket] = []
        # Flat buffers of the last two steps, the older first; {}: not allocated. The newer are still cached as a result.
        self._free_buffers: collections.deque[FlatBuffers] = collections.deque([{}, {}])
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
        """Rebuild the buckets if the list of trainable parameters changed: a script may freeze and unfreeze parameters."""
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
        """Start a step, whose first reduction may reuse flat buffers of earlier steps."""
        self._first_of_step = True
        self._update_buckets()

    def begin_micro_batch(self) -> None:
        """If the last backward pass raised during its reduction, discard the reduction, report the failure and block until a
        new generation starts.

        Other ranks that already wait in the discarded reduction repeat it in the new generation.
        """
        if self._reduction is not None:
            self._reduction = None
            if self._first_of_step:
                self._free_buffers.appendleft({})  # the aborted group may still write to the buffers in use
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
        bucket.count_gradient()  # a bucket with a parameter unfrozen in this pass may stay incomplete: it is issued at the end
        if bucket.is_full:
            self._collectives.issue_ahead(self._reduction.issue_full_buckets)

    def _on_backward_end(self) -> None:
        """Complete the reduction; autograd calls this before `backward()` returns."""
        reduction, self._reduction = self._reduction, None
        assert reduction is not None
        try:
            self._collectives.run(reduction, limited=not self._first_of_step)  # the first is cached at any size
            if self._first_of_step:
                self._free_buffers.append(reduction.filled_buffers)
            self._first_of_step = False
        finally:
            for bucket in self._buckets:
                bucket.begin_backward()


FlatBuffers = dict[int, tuple[Any, list[Any]]]  # by bucket number: a flat buffer and its views


class GradientReduction:
    """Gradient reduction of one backward pass, as a collective that can be reissued on another group.

    `free`: flat buffers to reuse; {}: allocate all.
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
        """Issue buckets in order, until one is not full."""
        self._reset_for_group(group)
        while len(self._flats) < len(self._buckets) and self._buckets[len(self._flats)].is_full:
            self._issue_next_bucket(group)

    def issue(self, group: Group) -> list[Work]:
        """Issue all buckets and model buffers not yet issued on this group, and return all works of this group.

        A gradient that this rank lacks is sent as zeros. Raise `UsageError` for a sparse gradient.
        """
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
        """Copy the results into the gradients and model buffers, and record the participants.

        The results are copied because gradient clipping and unscaling must not change the cached ones.
        """
        if results is not self._results:  # received from another rank; the aborted group may still write to local buffers
            self.filled_buffers = {}
        *flats, participants = results
        self._sample_weights.on_reduction_complete(participants)
        for number, (bucket, flat) in enumerate(zip(self._buckets, flats, strict=False)):
            bucket.copy_gradients_out(
                flat, self.filled_buffers[number][1] if self.filled_buffers else bucket.gradient_views(flat)
            )
        self._unpack_buffers(flats[len(self._buckets) :])

    def _reset_for_group(self, group: Group) -> None:
        if self._group is not group:
            if self._group is not None:
                self._free_buffers = {}  # the aborted group may still write to them
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
        """Return a list with one tensor of bytes: on rank 0 the model buffers, on other ranks zeros. Their sum is exact for any
        dtype."""
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
