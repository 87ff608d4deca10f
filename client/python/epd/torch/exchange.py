"""Dispatch and combine of tensors, with gradients."""

from __future__ import annotations

import functools
import threading
from typing import Any, Callable, NamedTuple, Optional, Sequence, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._handles import NotCopied
from ..group import Group
from ..ticket import Handle, Ticket
from ..types import IndexType, Layout, Payload, Region, ReturnWeights
from .checks import check_tensor, refuse
from .staging import Staging

# The region by which a combine counts the rows of y.
_COUNTED_BY = {
    Layout.COMPACT: Region.RANK_OFFSETS,
    Layout.PACKED: Region.EXPERT_OFFSETS,
    Layout.EXPERT: Region.EXPERT_COUNTS,
}


class Routing(NotCopied):
    """The routing that one dispatch has established, for combine and for the backward pass.

    It takes one of the group's num_handles until it is collected.
    """

    __slots__ = ("counts", "handle", "num_rows", "num_tokens")

    def __init__(self, handle: Handle, num_tokens: int, num_rows: Optional[int], counts: Tensor) -> None:
        self.handle = handle
        self.num_tokens = num_tokens  # n
        self.num_rows = num_rows  # M; None: tensors of received rows have room for the worst case
        self.counts = counts  # by which a combine counts the rows of y


class Received(NamedTuple):
    """The rows of a dispatch, as tensors of the caller's own. [rows] is [M], or the space for the worst case:
    [R*T], packed R*T*min(K, E/R) + padding, expert [E/R, R*T]. C = K (compact) or 1."""

    x: Tensor  # [rows, H] bf16 or e4m3, or [rows, opaque_bytes]; rows without a token are zero
    scales: Optional[Tensor]  # [rows, S]; payloads FP8_CAST and FP8
    topk_idx: Tensor  # [rows, C] local expert numbers, -1 elsewhere
    topk_weights: Tensor  # [rows, C] float32, 0 elsewhere
    src: Tensor  # [rows, 2] int32: source rank, token there; -1 where there is none
    expert_counts: Tensor  # [E/R] int32: rows of each local expert; compact: selections of it
    expert_offsets: Optional[Tensor]  # [E/R+1] int32: first row of each; not compact
    routing: Routing


_Call = TypeVar("_Call", bound=Callable[..., Any])


def _whole(call: _Call) -> _Call:
    """An operation that has the slot to itself, from its inputs to its results."""

    @functools.wraps(call)
    def locked(self: Exchange, *args: Any, **kwargs: Any) -> Any:
        self.group._check_process()  # the lock of a forked process may never be released
        with self._slot_lock:
            return call(self, *args, **kwargs)

    return cast(_Call, locked)


class Exchange(NotCopied):
    """Runs the dispatches and combines of a group on tensors, on torch's current stream.

    libepd copies tensors to and from one buffer slot. So results are the caller's, and stay. All ranks make the same
    calls in the same order; backward passes make calls too. On a CUDA device nothing waits but `dispatch` with
    exact=True, for its counts; `check` tells of failures.

    Threads may share a slot: a call waits until that of another thread has ended. Threads of several ranks must
    agree on an order all the same. On a CUDA device those that share a slot use one stream.

    A call that Ctrl-C ends has lost its result, but its operation counts among the group's: it has the slot until all
    ranks have made the call, or its deadline. Till then calls raise WouldBlock. Not to be repeated by this rank alone.
    """

    def __init__(self, group: Group, slot: int = 0) -> None:
        if not isinstance(group, Group):
            raise TypeError(f"group is {group!r}; allowed: a Group")
        self.group = group
        self.slot = slot
        self._slot_lock: Any = group._locks.setdefault(slot, threading.RLock())
        regions = group.tensors(slot)
        self.device: torch.device = regions.topk_idx.device
        config = group.config
        self._index = torch.int64 if config.index_type == IndexType.INT64 else torch.int32
        self._local = config.num_experts // config.num_ranks
        self._room = regions.recv_x.shape[:-1]

    # ---- calls -------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Optional[Tensor] = None,
        *,
        x_scales: Optional[Tensor] = None,
        exact: bool = True,
        sms: int = 0,
    ) -> Received:
        """Sends the rows of x to the ranks of their experts. Differentiable in x and topk_weights (payload BF16),
        once.

        x             [n, H] bf16 (BF16, FP8_CAST) or e4m3 (FP8), or [n, opaque_bytes] uint8
        topk_idx      [n, K] of the group's index type; negative: no selection
        topk_weights  [n, K] float32; None: zeros arrive
        x_scales      [n, S]; payload FP8
        exact         the tensors have as many rows as came; the host waits for the counts. False: they have room
                      for the worst case, and nothing waits (CUDA graphs). Layout EXPERT always has that room
        sms           SMs of this operation; 0: the group's

        Raises InvalidArgument, and what Group.dispatch raises.
        """
        config = self.group.config
        n = x.shape[0] if isinstance(x, Tensor) and x.dim() > 0 else 0
        self._check_rows(x, x_scales)
        self._check_choices(topk_idx, n)
        if topk_weights is not None:
            self._check_weights("topk_weights", topk_weights, n)
        request = _Request(topk_idx, x_scales, exact and config.layout != Layout.EXPERT, sms)
        if torch.is_grad_enabled() and (x.requires_grad or _needs_gradient(topk_weights)):
            self._check_differentiable()
            recv_x, recv_weights = _DispatchFunction.apply(self, request, x, topk_weights)
            received = request.received
            assert received is not None
            return received._replace(x=recv_x, topk_weights=recv_weights)
        return self.run_dispatch(request, x, topk_weights)

    def combine(
        self,
        y: Tensor,
        routing: Routing,
        *,
        topk_weights: Optional[Tensor] = None,
        biases: Sequence[Tensor] = (),
        sms: int = 0,
    ) -> Tensor:
        """Sends rows back and sums them for each token: [n, H] bf16. Differentiable in y, topk_weights and
        biases, once.

        y             [rows, H] bf16: one row for each received row; those without a token do not count
        topk_weights  [n, K] float32: rows are multiplied by them, and one of weight 0 is left out, even a NaN;
                      None: they are added as they are
        biases        up to num_biases tensors [n, H] bf16, which are added
        """
        config = self.group.config
        if not isinstance(routing, Routing):
            raise TypeError(f"routing is {routing!r}; allowed: Received.routing of a dispatch")
        if not isinstance(biases, (tuple, list)):
            raise TypeError(f"biases is {biases!r}; allowed: a tuple of tensors")
        rows = self._room if routing.num_rows is None else (routing.num_rows,)
        n = routing.num_tokens
        check_tensor("y", y, dtypes=torch.bfloat16, shape=(*rows, config.hidden), device=self.device)
        if topk_weights is not None:
            self._check_weights("topk_weights", topk_weights, n)
        if len(biases) > config.num_biases:
            raise refuse("biases", f"{len(biases)} tensors", f"at most {config.num_biases}, the group's num_biases")
        for number, bias in enumerate(biases):
            name = f"biases[{number}]"
            check_tensor(name, bias, dtypes=torch.bfloat16, shape=(n, config.hidden), device=self.device)
        differentiable = (y, topk_weights, *biases)
        if torch.is_grad_enabled() and any(_needs_gradient(each) for each in differentiable):
            self._check_differentiable()
            out: Tensor = _CombineFunction.apply(self, routing, sms, *differentiable)
            return out
        return self.run_combine(y, routing, topk_weights, biases, sms)

    def check(self) -> None:
        """Raises the status of the group's break, if it has one."""
        self.group.check()

    # ---- operations, without gradients -------------------------------------------------------------

    @_whole
    def run_dispatch(self, request: _Request, x: Tensor, topk_weights: Optional[Tensor]) -> Received:
        """A new routing and its rows."""
        regions = self.group.tensors(self.slot)
        staging = Staging()
        staging.give(Region.X, x)
        staging.give(Region.TOPK_IDX, request.topk_idx)
        if request.x_scales is not None:
            staging.give(Region.X_SCALES, request.x_scales)
        if topk_weights is not None:
            staging.give(Region.TOPK_WEIGHTS, topk_weights)
        expert_counts = self._wanted(staging, Region.EXPERT_COUNTS)
        expert_offsets = None
        if regions.expert_offsets is not None:
            expert_offsets = self._wanted(staging, Region.EXPERT_OFFSETS)
        counts = expert_counts
        if self.group.config.layout == Layout.COMPACT:
            counts = self._wanted(staging, Region.RANK_OFFSETS)
        elif self.group.config.layout == Layout.PACKED:
            assert expert_offsets is not None
            counts = expert_offsets
        rows = [] if request.exact else self._room_for_rows(staging, topk_weights is not None)
        dispatch = self.group.dispatch(
            self.slot,
            x.shape[0],
            stream=self._stream(),
            omit_weights=topk_weights is None,
            keep_handle=True,
            zero_padding=True,
            sms=request.sms,
            memory=staging,
        )
        num_rows = dispatch.counts().num_recv_rows if request.exact else None
        self._end(dispatch)
        if num_rows is not None:
            rows = self._copied_rows(num_rows, topk_weights is not None)
        routing = Routing(dispatch.handle, x.shape[0], num_rows, counts)
        return Received(*rows, expert_counts, expert_offsets, routing)

    @_whole
    def run_dispatch_again(
        self, x: Tensor, routing: Routing, topk_weights: Optional[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The rows of x under a routing, and the weights that came with them. Rows without a token are zero."""
        regions = self.group.tensors(self.slot)
        rows = self._room if routing.num_rows is None else (routing.num_rows,)
        staging = Staging(routing.num_rows or 0)
        staging.give(Region.X, x)
        if topk_weights is not None:
            staging.give(Region.TOPK_WEIGHTS, topk_weights)
        received = self._zeros(rows, regions.recv_x)
        weights = self._zeros(rows, regions.recv_topk_weights)
        staging.want(Region.RECV_X, received)
        if topk_weights is not None:
            staging.want(Region.RECV_TOPK_WEIGHTS, weights)
        ticket = self.group.dispatch(
            self.slot,
            handle=routing.handle,
            stream=self._stream(),
            omit_weights=topk_weights is None,
            zero_padding=True,
            memory=staging,
        )
        self._end(ticket)
        return received, weights

    @_whole
    def run_combine(
        self,
        y: Tensor,
        routing: Routing,
        topk_weights: Optional[Tensor] = None,
        biases: Sequence[Tensor] = (),
        sms: int = 0,
    ) -> Tensor:
        """The sums of rows."""
        staging = self._staging_of_y(y, routing)
        if topk_weights is not None:
            staging.give(Region.TOPK_WEIGHTS, topk_weights)
        for region, bias in zip((Region.BIAS_0, Region.BIAS_1), biases):
            staging.give(region, bias)
        out = self._new((routing.num_tokens, self.group.config.hidden), torch.bfloat16)
        staging.want(Region.OUT, out)
        ticket = self.group.combine(
            self.slot,
            routing.handle,
            stream=self._stream(),
            weighted=topk_weights is not None,
            num_biases=len(biases),
            sms=sms,
            memory=staging,
            num_tokens=routing.num_tokens,
        )
        self._end(ticket)
        return out

    @_whole
    def run_combine_weights(self, y: Tensor, y_weights: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """The sums of rows, and for each selection the weight of the row that carried it."""
        config = self.group.config
        staging = self._staging_of_y(y, routing)
        staging.give(Region.Y_WEIGHTS, y_weights)
        out = self._new((routing.num_tokens, config.hidden), torch.bfloat16)
        out_weights = self._new((routing.num_tokens, config.topk), torch.float32)
        staging.want(Region.OUT, out)
        staging.want(Region.OUT_WEIGHTS, out_weights)
        ticket = self.group.combine(
            self.slot,
            routing.handle,
            stream=self._stream(),
            return_weights=ReturnWeights.OWN,
            memory=staging,
            num_tokens=routing.num_tokens,
        )
        self._end(ticket)
        return out, out_weights

    # ---- inside ------------------------------------------------------------------------------------

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def _zeros(self, rows: Sequence[int], region: Tensor) -> Tensor:
        """Rows like the region's. By bytes: not every type can be filled."""
        made = self._new((*rows, region.shape[-1]), region.dtype)
        made.view(torch.uint8).zero_()
        return made

    def _wanted(self, staging: Staging, region: Region) -> Tensor:
        """A tensor like a region, which the operation will write."""
        made = torch.empty_like(getattr(self.group.tensors(self.slot), region.name.lower()))
        staging.want(region, made)
        return made

    def _room_for_rows(self, staging: Staging, weighted: bool) -> list[Any]:
        """recv_x, recv_scales, recv_topk_idx, recv_topk_weights, recv_src for the worst case, before the rows."""
        b = self.group.tensors(self.slot)
        received = self._zeros(self._room, b.recv_x)
        scales = None if b.recv_scales is None else self._zeros(self._room, b.recv_scales)
        idx, src = torch.full_like(b.recv_topk_idx, -1), torch.full_like(b.recv_src, -1)
        weights = self._zeros(self._room, b.recv_topk_weights)
        staging.want(Region.RECV_X, received)
        if scales is not None:
            staging.want(Region.RECV_SCALES, scales)
        staging.want(Region.RECV_TOPK_IDX, idx)
        if weighted:
            staging.want(Region.RECV_TOPK_WEIGHTS, weights)
        staging.want(Region.RECV_SRC, src)
        return [received, scales, idx, weights, src]

    def _copied_rows(self, num_rows: int, weighted: bool) -> list[Any]:
        """The same, of the rows that have come."""
        b = self.group.tensors(self.slot)
        weights = b.recv_topk_weights[:num_rows]
        return [
            b.recv_x[:num_rows].clone(),
            None if b.recv_scales is None else b.recv_scales[:num_rows].clone(),
            b.recv_topk_idx[:num_rows].clone(),
            weights.clone() if weighted else torch.zeros_like(weights),
            b.recv_src[:num_rows].clone(),
        ]

    def _staging_of_y(self, y: Tensor, routing: Routing) -> Staging:
        staging = Staging(routing.num_rows or 0)
        staging.give(Region.Y, y)
        layout = self.group.config.layout
        staging.give(_COUNTED_BY[layout], routing.counts)
        return staging

    def _stream(self) -> Any:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def _end(self, ticket: Ticket) -> None:
        """On host devices waits for the operation. Streams keep the order by themselves."""
        if self.device.type != "cuda":
            ticket.wait()

    def _check_rows(self, x: Tensor, x_scales: Optional[Tensor]) -> None:
        regions = self.group.tensors(self.slot)
        check_tensor("x", x, dtypes=regions.x.dtype, shape=(None, regions.x.shape[1]), device=self.device)
        if x.shape[0] > self.group.config.max_tokens:
            raise refuse("x.shape[0]", x.shape[0], f"0 .. {self.group.config.max_tokens}, the group's max_tokens")
        scales = regions.x_scales
        if scales is None:
            if x_scales is not None:
                raise refuse("x_scales", "a tensor", f"None with payload {self.group.config.payload.name}")
            return
        if x_scales is None:
            raise refuse("x_scales", None, "a tensor with payload FP8")
        shape = (x.shape[0], scales.shape[1])
        check_tensor("x_scales", x_scales, dtypes=scales.dtype, shape=shape, device=self.device)

    def _check_choices(self, topk_idx: Tensor, n: int) -> None:
        if isinstance(topk_idx, Tensor) and topk_idx.dtype != self._index:
            allowed = f"{self._index}, as the group's index_type is {self.group.config.index_type.name}"
            raise refuse("topk_idx.dtype", topk_idx.dtype, allowed)
        shape = (n, self.group.config.topk)
        check_tensor("topk_idx", topk_idx, dtypes=self._index, shape=shape, device=self.device)

    def _check_weights(self, name: str, weights: Tensor, n: int) -> None:
        shape = (n, self.group.config.topk)
        check_tensor(name, weights, dtypes=torch.float32, shape=shape, device=self.device)

    def _check_differentiable(self) -> None:
        payload = self.group.config.payload
        if payload != Payload.BF16:
            raise refuse("payload", payload.name, "BF16 for gradients")


class _Request:
    """The inputs of a dispatch that have no gradient, and its outputs."""

    __slots__ = ("exact", "received", "sms", "topk_idx", "x_scales")

    def __init__(self, topk_idx: Tensor, x_scales: Optional[Tensor], exact: bool, sms: int) -> None:
        self.topk_idx = topk_idx
        self.x_scales = x_scales
        self.exact = exact
        self.sms = sms
        self.received: Optional[Received] = None


def _needs_gradient(tensor: Optional[Tensor]) -> bool:
    return tensor is not None and tensor.requires_grad


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """[..., H] and [..., H] to their products' sums [..., 1], in float32."""
    return (a.float() * b.float()).sum(-1, keepdim=True)


class _DispatchFunction(torch.autograd.Function):
    """The backward of a dispatch is a combine under its routing."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, request: _Request, x: Tensor, topk_weights: Any) -> Any:
        request.received = received = exchange.run_dispatch(request, x, topk_weights)
        ctx.exchange = exchange
        ctx.routing = received.routing
        return received.x, received.topk_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor) -> Any:
        exchange, routing = ctx.exchange, ctx.routing
        if not ctx.needs_input_grad[3]:
            return None, None, exchange.run_combine(grad_x, routing), None
        out, out_weights = exchange.run_combine_weights(grad_x, grad_weights, routing)
        return None, None, out, out_weights


class _CombineFunction(torch.autograd.Function):
    """The backward of a combine is a dispatch under its routing."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, routing: Routing, sms: int, y: Tensor, topk_weights: Any, *biases: Tensor
    ) -> Tensor:
        ctx.exchange = exchange
        ctx.routing = routing
        ctx.weighted = topk_weights is not None
        if ctx.weighted:
            ctx.save_for_backward(y, topk_weights)
        return exchange.run_combine(y, routing, topk_weights, biases, sms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        exchange, routing = ctx.exchange, ctx.routing
        biases = [grad_out if needed else None for needed in ctx.needs_input_grad[5:]]
        if not ctx.weighted:
            rows, _ = exchange.run_dispatch_again(grad_out, routing, None)
            return (None, None, None, rows, None, *biases)
        y, topk_weights = ctx.saved_tensors
        rows, weights = exchange.run_dispatch_again(grad_out, routing, topk_weights)
        grad_y = (weights.sum(-1, keepdim=True) * rows.float()).to(torch.bfloat16)
        grad_weights = None
        if ctx.needs_input_grad[4]:
            products = row_products(rows, y).expand_as(weights)
            _, grad_weights = exchange.run_combine_weights(torch.zeros_like(y), products, routing)
        return (None, None, None, grad_y, grad_weights, *biases)


