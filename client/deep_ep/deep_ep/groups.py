"""The groups of a Buffer. Each is joined when it is first used; all ranks use it first in the same call."""

from __future__ import annotations

import itertools
import os
import time
import uuid
import weakref
from typing import Any, Callable, NamedTuple, Optional, TypeVar

import torch
import torch.distributed
from torch import Tensor

import epd

from . import config
from .checks import check_number, not_served, refuse, refuse_capture
from .growth import FIRST, NOTHING, Asked, Size
from .rows import LOW_LATENCY_ROWS, NORMAL_ROWS
from .shrink import Steps
from .streams import Streams
from .team import Team
from .turns import Turns
from .watch import Watch

T = TypeVar("T")
_PATIENCE = 100.0  # seconds that a submission waits for room
_MOST_KNOWN = 4096  # arguments of calls that are remembered
_buffers = itertools.count()  # of this process


class Shape(NamedTuple):
    """The key of a Buffer's groups that new calls use."""

    num_experts: int
    hidden: int
    topk: int
    low_latency: bool = False
    opaque: int = 0  # bytes of a row that epd does not know; 0: rows that it knows

    @property
    def mode(self) -> str:
        return "low-latency" if self.low_latency else "normal"

    def __str__(self) -> str:
        kind = f"{self.opaque} bytes, " if self.opaque else ""
        return f"{self.mode} mode ({kind}{self.num_experts} experts, hidden {self.hidden}, {self.topk} choices)"


class Use:
    """Low-latency handles keep that of their group. When the group has been replaced, nobody else does."""

    __slots__ = ("__weakref__",)


class Joined:
    """A group of which this rank is a member."""

    def __init__(self, group: epd.Group, shape: Shape, shrink: bool = False) -> None:
        self.group = group
        self.shape = shape
        self.size = Size(group.config.max_tokens, group.config.num_handles)
        self.captured = False  # a graph may have operations of it
        self.use: Optional[Use] = Use()
        self._used = weakref.ref(self.use)
        self.steps = Steps() if shrink else None  # what goes on without lost ranks
        self.watch: Optional[Watch] = None
        self.turns = Turns()  # of low-latency operations
        self.generation = 0  # how often late ranks have come back
        self.waits_read: Optional[list[int]] = None  # waits() as statistics last had them
        self.unused: Optional[tuple[Tensor, Tensor, Tensor]] = None  # parts of the handles of normal mode
        # Views of the slots, as low-latency dispatches give them: by slot and row format.
        self.results: dict[tuple[int, int], Any] = {}
        # Hooks of operations in flight that the CPU has to call.
        self._pending: list[Callable[[], None]] = []
        self._y_shape: Optional[tuple[int, ...]] = None

    @property
    def y_shape(self) -> tuple[int, ...]:
        """The shape of the rows that a combine sends back."""
        shape = self._y_shape
        if shape is None:
            shape = self._y_shape = tuple(self.regions(0).y.shape)
        return shape

    def regions(self, slot: int, row_format: int = 0) -> epd.Buffers[Tensor]:
        return self.group.tensors(slot, row_format)

    def look(self, stream: Any) -> None:
        """For the watch."""
        if self.steps is not None:
            self.steps.look(self, stream)

    def restored(self) -> None:
        """Late ranks have come back: all ranks start over with the same slot, and without handles."""
        self.turns, self.waits_read = Turns(), None
        self.generation += 1
        self._pending.clear()

    @property
    def needed(self) -> bool:
        """Whether a graph, a low-latency handle or a hook needs it; or lost ranks would take its end for a loss."""
        return self.captured or self.steps is not None or len(self._pending) > 0 or self._used() is not None

    def replaced(self) -> None:
        """A larger group replaces it."""
        self.use = None

    def settle(self) -> None:
        """Waits for operations in flight whose hooks were not called, as far as the CPU has to wait for them."""
        while self._pending:
            try:
                self._pending[0]()
            except epd.Error:
                del self._pending[0]
                raise
            del self._pending[0]  # not if it was interrupted

    def submit(self, submission: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Submits when there is room, after what is in flight."""
        self.settle()
        return self.submit_now(submission, *arguments, **options)

    def submit_now(self, submission: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Submits when there is room."""
        end = 0.0
        while True:
            try:
                return submission(*arguments, **options)
            except epd.WouldBlock:
                now = time.monotonic()
                end = end or now + _PATIENCE
                if now > end:
                    raise
            time.sleep(0.00002)

    def remember(self, arrive: Callable[[], None]) -> None:
        """The CPU must have waited for the operation before the next one is submitted."""
        self._pending.append(arrive)

    def lost(self, rank: int) -> bool:
        itself = self.steps is not None and self.steps.out and rank == self.group.rank
        return itself or not self.group.active(rank)

    def waits(self) -> list[int]:
        """For how long each rank has held up this one since the join, in nanoseconds."""
        waits = self.group.waits()
        return [ready + arrived for ready, arrived in zip(waits.ready_ns, waits.arrived_ns)]


class Groups:
    """A session and the groups that this rank has joined in it."""

    def __init__(self, team: Team, nvl_bytes: int = 0, rdma_bytes: int = 0, shrink: bool = False) -> None:
        """nvl_bytes, rdma_bytes: not needed. shrink: low-latency groups go on without lost ranks. All ranks call; if one
        can't, none can.
        """
        self._team = team
        self.size = team.size
        self.shrink = shrink
        self.session, facts = team.make("the Buffer", lambda: _attach(nvl_bytes, rdma_bytes))
        info = self.session.info
        try:
            _check_alike(facts)
        except Exception:
            self.session.detach()
            raise
        self.name = facts[0].name
        self.on_host = info.device_kind == epd.DeviceKind.HOST
        current = 0 if self.on_host else torch.cuda.current_device()
        self.device = torch.device("cpu") if self.on_host else torch.device("cuda", current)
        self._joined: dict[Shape, Joined] = {}
        self.replaced: list[Joined] = []  # by larger ones, and still needed
        self._numbers: dict[str, int] = {}  # of the next group of each mode
        self._known: dict[object, Joined] = {}

    def rows(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Rows for a result."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def normal(self, shape: Shape, streams: Streams, least: Size = NOTHING) -> Joined:
        """One row for each (token, rank), by source rank, then token; operations of one stream use slot 0. least: the
        same on all ranks."""
        joined = self._joined.get(shape)
        if joined is not None and joined.size.covers(least):
            return joined
        size = FIRST.covering(least)
        for each in self._joined.values():  # ranks have as many tokens in all their layers
            if not each.shape.low_latency:
                size = size.covering(each.size if each is joined else Size(each.size.tokens, 0))
        return self._join(
            shape,
            streams,
            max_tokens=size.tokens,
            depth=1,
            num_biases=2,
            num_handles=size.handles,
            shared_regions=1,  # calls name their rows, or have taken them from the slot before the next one
        )

    def larger(self, joined: Joined, asked: Asked, streams: Streams) -> Joined:
        """In place of a group in which a rank has asked for more. All ranks call."""
        resumed = joined.group.resume()  # graphs go on with it
        if resumed.resume_op != asked.op_index:
            text = f"{joined.shape} could not grow to {asked.size.tokens} tokens and {asked.size.handles} handles"
            raise epd.Aborted(f"{text}: operation {resumed.resume_op} has not ended well on all ranks")
        return self.normal(joined.shape, streams, asked.size)

    def low_latency(self, shape: Shape, tokens: int, streams: Streams) -> Joined:
        """Each expert's rows in a block of its own, in two slots. tokens: the same on all ranks."""
        joined = self._joined.get(shape)
        if joined is not None and joined.size.tokens >= tokens:
            return joined
        return self._join(
            shape,
            streams,
            max_tokens=tokens,
            depth=2,
            layout=epd.Layout.EXPERT,
            scale_layout=epd.ScaleLayout.COLUMN_MAJOR,
            policy=epd.Policy.DEGRADE_LATE if self.shrink else epd.Policy.FAIL_FAST,
        )

    def leave_unneeded(self, streams: Streams) -> None:
        """Groups that larger ones have replaced."""
        if streams.capturing:
            return
        gone = [joined for joined in self.replaced if not joined.needed]
        if gone and not self.on_host:
            torch.cuda.synchronize(self.device)  # an operation in flight would fail
        for joined in gone:
            self.replaced.remove(joined)
            joined.results.clear()
            joined.group.leave()

    def of_arguments(self, arguments: object) -> Optional[Joined]:
        """The group of a call with such arguments, if there was one and no larger one has replaced it. Then these are
        right."""
        try:
            return self._known.get(arguments)
        except TypeError:  # can't be hashed
            return None

    def remember(self, arguments: object, joined: Joined) -> None:
        """These arguments of a call are right, and the group is theirs."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[arguments] = joined

    def has(self, joined: Joined) -> bool:
        """It is a group of this Buffer that serves its handles. In normal mode one that was replaced does not."""
        return self._joined.get(joined.shape) is joined or (joined.shape.low_latency and joined in self.replaced)

    def all(self) -> list[Joined]:
        return [*self.replaced, *self._joined.values()]

    def lost(self) -> set[int]:
        """Ranks that any group has lost."""
        return {rank for joined in self.all() for rank in range(self.size) if joined.lost(rank)}

    def leave(self) -> None:
        for joined in self.all():
            if joined.watch is not None:
                joined.watch.stop()
            joined.results.clear()  # views that the caller has keep their memory, no others
        self._joined.clear()
        self.replaced.clear()
        self._known.clear()
        self.session.detach()

    def _join(self, shape: Shape, streams: Streams, **fields: Any) -> Joined:
        if streams.capturing:
            raise refuse_capture(f"{shape} with {fields['max_tokens']} tokens of a rank")
        before = self._joined.get(shape)
        if before is not None:
            before.settle()
        lost = self.lost() if self.shrink else set()
        if lost:
            gone = ", ".join(str(rank) for rank in sorted(lost))
            given = f"the first call of its kind after the loss of {gone}"
            raise not_served(str(shape), given, "kinds of calls that were made before, or a new Buffer")
        group = self.session.join(
            epd.GroupConfig(
                name=self._name_of(shape),
                rank=self._team.rank,
                num_ranks=self._team.size,
                num_experts=shape.num_experts,
                hidden=shape.hidden,
                topk=shape.topk,
                index_type=epd.IndexType.INT64,
                **_rows_of(shape),
                **fields,
            )
        )
        joined = Joined(group, shape, shrink=self.shrink and shape.low_latency)
        if joined.steps is not None:
            joined.watch = Watch(joined.look, self.device)
        if before is not None:
            before.replaced()
            self.replaced.append(before)
            self._known.clear()
        self._joined[shape] = joined
        self._numbers[shape.mode] = self._numbers.get(shape.mode, 0) + 1
        if self.replaced:
            self.leave_unneeded(streams)
        return joined

    def _name_of(self, shape: Shape) -> str:
        """The name has a number and not the shape: if ranks differ in the shape, the join names the field."""
        return f"{self.name}-{shape.mode}-{self._numbers.get(shape.mode, 0)}"


def _rows_of(shape: Shape) -> dict[str, Any]:
    if shape.opaque:
        return {"payload": epd.Payload.OPAQUE, "opaque_bytes": shape.opaque}
    return {"more_formats": (LOW_LATENCY_ROWS if shape.low_latency else NORMAL_ROWS)[1:]}


class _Facts(NamedTuple):
    """The facts about a rank that the other ranks get."""

    name: str  # of the Buffer, if this is rank 0
    boot_id: str
    device_kind: str


def _check_alike(facts: list[_Facts]) -> None:
    daemons = sorted({each.boot_id for each in facts})
    if len(daemons) > 1:
        given = f"the ranks have attached to {len(daemons)} daemons: {', '.join(daemons)}"
        raise NotImplementedError(f"{given}; epd serves: ranks on one node, with one daemon")
    kinds = sorted({each.device_kind for each in facts})
    if len(kinds) > 1:
        raise epd.InvalidArgument(f"the ranks have devices of kinds {' and '.join(kinds)}; allowed: one kind")


def _attach(nvl_bytes: object, rdma_bytes: object) -> tuple[epd.Session, _Facts]:
    """A session, if what this rank is given is right, and what the other ranks are told of it."""
    check_number("num_nvl_bytes", nvl_bytes, 0, "0 or more")
    check_number("num_rdma_bytes", rdma_bytes, 0, "0 or more")
    name = _buffer_name()
    session = epd.attach(device=_device_name())
    info = session.info
    return session, _Facts(name, info.boot_id, info.device_kind.name)


def _buffer_name() -> str:
    """The job's, if it has one, with this process's rank and the number of its Buffer: the same in every run."""
    job = config.job_name()
    if not job or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return f"{job or 'deepep'}-{uuid.uuid4().hex[:12]}"
    return f"{job}-r{torch.distributed.get_rank()}-b{next(_buffers)}"


def _device_name() -> Optional[str]:
    """$EPD_DEEPEP_DEVICE, else torch's current GPU, else the least used device."""
    given = os.environ.get("EPD_DEEPEP_DEVICE")
    if given:
        return given
    if not torch.cuda.is_available():
        return None
    current = torch.cuda.current_device()
    uuid_of_gpu = getattr(torch.cuda.get_device_properties(current), "uuid", None)
    if uuid_of_gpu is not None:  # in a container its number is not the daemon's; torch before 2.5 does not say it
        return f"GPU-{uuid_of_gpu}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return f"cuda:{current}"
    number = visible.split(",")[current].strip()
    if not number.isdecimal():
        allowed = "numbers, or the daemon's device in $EPD_DEEPEP_DEVICE (cuda:1)"
        raise refuse("$CUDA_VISIBLE_DEVICES", repr(visible), allowed)
    return f"cuda:{number}"
