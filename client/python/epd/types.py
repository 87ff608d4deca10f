"""The numbers, shapes and results of epd.h as Python types."""

from __future__ import annotations

import ctypes
import enum
import operator
import os
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Optional, Sequence, Union

from . import _abi
from ._library import library
from .errors import InvalidArgument, Status, check

FOREVER = _abi.FOREVER
NO_WAIT = _abi.NO_WAIT
ANY_RANK = _abi.ANY_RANK


class WaitBy(enum.IntEnum):
    """How streams wait: see epd_attach_options_t."""

    MEMOP = 0
    KERNEL = 1
    EVENT = 2


class DeviceKind(enum.IntEnum):
    """The kind of a device."""

    HOST = 0
    CUDA = 1


class Payload(enum.IntEnum):
    """The contents of a row of x and recv_x."""

    BF16 = 0  # the caller writes hidden bf16 values, receivers get the same
    FP8_CAST = 1  # writes bf16; get e4m3 with one scale for each 128 values, the last for the rest
    FP8 = 2  # writes e4m3 and scales; get the same
    OPAQUE = 3  # writes opaque_bytes; get the same


class ScaleFormat(enum.IntEnum):
    """Scales of e4m3 rows, one for each block of 128 values."""

    FLOAT32 = 0  # float32 [., ceil(H/128)]
    FLOAT32_POW2 = 1  # the same, rounded up to a power of two; FP8_CAST only
    UE8M0 = 2  # exponent bytes, four to an int32 [., ceil(H/512)]


class Layout(enum.IntEnum):
    """How received rows lie."""

    COMPACT = 0  # one row per (token, rank), by source rank, then token
    PACKED = 1  # one row per (token, local expert), by expert, each expert's first row aligned
    EXPERT = 2  # the same rows, each expert in a block of its own


class ScaleLayout(enum.IntEnum):
    """Where the scales of received rows lie."""

    ROW_MAJOR = 0  # with their row
    COLUMN_MAJOR = 1  # by scale, as TMA and DeepGEMM read them; strides see Buffers


class RangeFormat(enum.IntEnum):
    """The form of an entry of source_ranges, for each (local expert, source rank)."""

    ROWS = 0  # two int32: first row, number of rows
    PACKED64 = 1  # one int64: first row << 32 | number of rows, from the expert's first row on


class IndexType(enum.IntEnum):
    """The type of topk_idx and recv_topk_idx."""

    INT32 = 0
    INT64 = 1


class Span(enum.IntEnum):
    """Where the ranks of a group may be."""

    NODE = 0
    CLUSTER = 1


class Policy(enum.IntEnum):
    """The effect of a lost rank on its group."""

    FAIL_FAST = 0  # the group ends
    DEGRADE = 1  # after Group.resume the others go on without it. A silent one costs each operation its deadline
    DEGRADE_LATE = 2  # and a rank is lost that an operation has waited for until its deadline


class ReturnWeights(enum.IntEnum):
    """Which y_weights a combine returns, as out_weights."""

    NONE = 0
    OWN = 1  # each selection's: of the row that carried it
    SUM = 2  # compact: each column, summed over all ranks that got the token; other layouts: as OWN


class Region(enum.IntEnum):
    """The regions of a buffer slot. `Buffers` says what each holds."""

    X = 0
    X_SCALES = 1
    TOPK_IDX = 2
    TOPK_WEIGHTS = 3
    RECV_X = 4
    RECV_SCALES = 5
    RECV_TOPK_IDX = 6
    RECV_TOPK_WEIGHTS = 7
    RECV_SRC = 8
    RANK_OFFSETS = 9
    EXPERT_COUNTS = 10
    EXPERT_OFFSETS = 11
    SOURCE_RANGES = 12
    Y = 13
    Y_WEIGHTS = 14
    BIAS_0 = 15
    BIAS_1 = 16
    OUT = 17
    OUT_WEIGHTS = 18


class RowFormat(NamedTuple):
    """The format of a dispatch's rows."""

    payload: Payload = Payload.BF16
    scale_format: ScaleFormat = ScaleFormat.FLOAT32


# [fields.py: GroupConfig]
@dataclass(frozen=True)
class GroupConfig:
    """The shape of a group. All ranks give the same, but for rank, timeout_ms, sms and priority.

    name              1..63 characters of [A-Za-z0-9._-]
    rank              0..num_ranks-1, or ANY_RANK: any free one
    num_ranks         R, 1..1024
    num_experts       E: a multiple of R, at most 4096. Expert e lives on rank e / (E/R)
    max_tokens        T, 1..65536: the most tokens of a dispatch. Sizes of buffers follow from it
    hidden            H: a multiple of 8, at most 16384
    topk              K, 1..32
    depth             buffer slots, 1..16; 0: 4
    payload           with scale_format: row format 0
    index_type        of topk_idx and recv_topk_idx
    policy            what becomes of the group when a rank is lost
    sms               SMs (host devices: threads) of the device to use; 0: the device's default
    timeout_ms        of the join; 0: the daemon's timeouts.join_ms, 60 s if not configured
    layout            how received rows lie
    scale_format      of e4m3 rows
    expert_alignment  rows, 1..256; 0: 1. Layout.PACKED: each expert's first row is a multiple of it.
                      Layout.COMPACT: expert_counts are rounded up to it
    opaque_bytes      of a row: a multiple of 16, 16..65536; Payload.OPAQUE only
    num_biases        bias regions that combine may add, 0..2
    num_handles       handles that dispatches may keep, 0..4096
    max_recv_rows     rows of recv_x and y (Layout.EXPERT: of each expert's block); 0: the worst case. A dispatch
                      that needs more fails with RESOURCE_EXHAUSTED on all ranks; with Span.CLUSTER on those of the
                      node, and ranks of other nodes may be taken back to it by the resume
    priority          of this rank's operations on its device, -8..7; higher goes first
    sum_ranks         ranks of a sum domain, 1..R; 0: the daemon's choice, R for a group on one node. Combine adds
                      up the rows of each sum domain, and rounds the sums of other domains than its own to bf16.
                      CUDA devices take 0 and R
    span              where ranks may be. Span.CLUSTER: on any node of the cluster, host devices only
    scale_layout      of received rows; Payload.FP8_CAST and Payload.FP8
    range_format      of source_ranges; Layout.PACKED and Layout.EXPERT
    more_formats      row formats 1, 2, 3, which a dispatch may choose by row_format. All differ. Regions have room
                      for the largest. Not with Payload.OPAQUE
    shared_regions    1: in a slot, y lies where recv_x lies, and out where x does: about half the memory, for calls
                      that name these rows in memory of the caller's, or write y over recv_x. No operation of a slot
                      may begin before what the one before it has left there has been read
    """

    name: str = ""
    rank: int = 0
    num_ranks: int = 0
    num_experts: int = 0
    max_tokens: int = 0
    hidden: int = 0
    topk: int = 0
    depth: int = 0
    payload: Payload = Payload.BF16
    index_type: IndexType = IndexType.INT32
    policy: Policy = Policy.FAIL_FAST
    sms: int = 0
    timeout_ms: int = 0
    layout: Layout = Layout.COMPACT
    scale_format: ScaleFormat = ScaleFormat.FLOAT32
    expert_alignment: int = 0
    opaque_bytes: int = 0
    num_biases: int = 0
    num_handles: int = 0
    max_recv_rows: int = 0
    priority: int = 0
    sum_ranks: int = 0
    span: Span = Span.NODE
    scale_layout: ScaleLayout = ScaleLayout.ROW_MAJOR
    range_format: RangeFormat = RangeFormat.ROWS
    more_formats: Sequence[RowFormat] = ()
    shared_regions: int = 0
# [end]

    def with_format(self, row_format: int) -> GroupConfig:
        """The same with this row format alone. Raises InvalidArgument."""
        row_format = integer("row_format", row_format)
        if not 0 <= row_format <= len(self.more_formats):
            raise InvalidArgument(f"row_format is {row_format}; allowed: 0 .. {len(self.more_formats)}")
        if not self.more_formats:
            return self
        formats = [RowFormat(self.payload, self.scale_format), *self.more_formats]
        payload, scale_format = formats[row_format]
        has_scales = payload in (Payload.FP8_CAST, Payload.FP8)
        scale_layout = self.scale_layout if has_scales else ScaleLayout.ROW_MAJOR
        return replace(
            self, payload=payload, scale_format=scale_format, scale_layout=scale_layout, more_formats=()
        )

    def region_bytes(self, region: Region) -> int:
        """Bytes of a region in one slot; 0 if such a group has no such region. Raises InvalidArgument."""
        raw = self._raw()
        size = ctypes.c_uint64()
        _check_enum("region", region, Region)
        check(library.epd_region_bytes(ctypes.addressof(raw), region, ctypes.addressof(size)))
        return size.value

    def group_bytes(self, kind: DeviceKind) -> GroupBytes:
        """The memory that such a group takes on devices of a kind. Raises InvalidArgument."""
        raw = self._raw()
        _check_enum("kind", kind, DeviceKind)
        size = _abi.GroupBytes(ctypes.sizeof(_abi.GroupBytes))
        check(library.epd_group_bytes(ctypes.addressof(raw), kind, ctypes.addressof(size)))
        return GroupBytes(*(getattr(size, name) for name in GroupBytes._fields))

    def _raw(self) -> _abi.GroupConfig:
        raw = _abi.GroupConfig(ctypes.sizeof(_abi.GroupConfig))
        raw.name = encoded("name", self.name)
        for field in fields(self):
            if field.name not in ("name", "more_formats"):
                set_number(raw, field.name, getattr(self, field.name))
        more = _items("more_formats", self.more_formats, RowFormat, "a RowFormat")
        formats = (_abi.RowFormat * len(more))()
        for place, row_format in zip(formats, more):
            set_number(place, "payload", row_format.payload)
            set_number(place, "scale_format", row_format.scale_format)
        raw.more_formats = formats
        raw.num_more_formats = len(more)
        return raw


def _items(field: str, items: Any, kind: type, allowed: str) -> Sequence[Any]:
    """A sequence of objects of one class. Raises TypeError."""
    if not isinstance(items, (tuple, list)):
        raise TypeError(f"{field} is {items!r}; allowed: a tuple or list")
    for item in items:
        if not isinstance(item, kind):
            raise TypeError(f"{field} has {item!r}; allowed: {allowed}")
    return items


def encoded(field: str, text: Union[str, bytes, os.PathLike[str]], allowed: str = "text") -> bytes:
    """Text for the library. Raises InvalidArgument for a NUL inside, TypeError if it is no text."""
    try:
        data = os.fsencode(text)
    except TypeError:
        raise TypeError(f"{field} is {text!r}; allowed: {allowed}") from None
    if b"\0" in data:
        raise InvalidArgument(f"{field} is {text!r}; allowed: text without NUL")
    return data


def integer(name: str, value: Any) -> int:
    """Also of numpy's integers. Raises TypeError."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; allowed: an integer") from None


def set_number(raw: ctypes.Structure, field: str, value: int) -> None:
    """Sets a field of a struct. Raises InvalidArgument if it can't hold the number, TypeError if it is none.

    Numbers that fit are the library's to judge."""
    try:
        setattr(raw, field, value)
    except TypeError:
        raise TypeError(f"{field} is {value!r}; allowed: an integer") from None
    if getattr(raw, field) != value:
        raise InvalidArgument(f"{field} is {value}; allowed: {_ALLOWED[field]}")


def _check_enum(name: str, value: int, kind: type[enum.IntEnum]) -> None:
    if not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; allowed: a {kind.__name__}")
    if not 0 <= value <= max(kind):
        raise InvalidArgument(f"{name} is {value}; allowed: 0 .. {max(kind)}")


_ENUMS: dict[str, type[enum.IntEnum]] = {
    "payload": Payload,
    "index_type": IndexType,
    "policy": Policy,
    "layout": Layout,
    "scale_format": ScaleFormat,
    "span": Span,
    "scale_layout": ScaleLayout,
    "range_format": RangeFormat,
    "wait_by": WaitBy,
    "region": Region,
}
_ALLOWED = {
    **{field: f"0 .. {max(kind)}" for field, kind in _ENUMS.items()},
    # [fields.py: ranges]
    "rank": "0 .. num_ranks - 1, or ANY_RANK (-1)",
    "num_ranks": "1 .. 1024",
    "num_experts": "1 .. 4096, a multiple of num_ranks",
    "max_tokens": "1 .. 65536",
    "hidden": "multiples of 8, 8 .. 16384",
    "topk": "1 .. 32",
    "depth": "0 .. 16",
    "sms": "0 .. 4294967295",
    "timeout_ms": "0 .. 2147483647",
    "expert_alignment": "0 .. 256",
    "opaque_bytes": "multiples of 16, 0 .. 65536",
    "num_biases": "0 .. 2",
    "num_handles": "0 .. 4096",
    "max_recv_rows": "0 .. 2147483647",
    "priority": "-8 .. 7",
    "sum_ranks": "0 .. num_ranks",
    "shared_regions": "0 .. 1",
    # [end]
}


class GroupBytes(NamedTuple):
    """Bytes of memory that the daemon allocates for a group; see epd_group_bytes_t."""

    user_arena: int
    exchange_arena: int
    routing_records: int
    inboxes: int
    board: int
    results: int
    rank: int
    group: int
    routing_quota: int


class SessionInfo(NamedTuple):
    """The daemon and device of a session."""

    session_id: int
    device: str  # "host:0"
    daemon: str  # name and version
    boot_id: str  # hexadecimal; each run of the daemon has another one
    device_kind: DeviceKind


class Result(NamedTuple):
    """How an operation ended. Times are in microseconds."""

    status: Status
    failed_rank: int  # the rank that caused the failure; -1: none, or not known
    op_index: int  # the operation's number in its group; a guess if it failed
    num_recv_rows: int  # M, after a dispatch
    seen_us: int  # 0: nobody sees an operation before the device begins it
    launched_us: int  # 0, likewise
    done_us: int  # on the device, from begin to end; 0: not known
    num_dropped_selections: int  # Policy.DEGRADE: selections whose expert's rank is lost
    runs: int  # 1; of an operation captured in a graph: its replays that have ended


class ResumeInfo(NamedTuple):
    """Where a group goes on."""

    epoch: int
    resume_op: int  # the first operation that some rank has not completed: repeat from here
    num_active_ranks: int


class Progress(NamedTuple):
    """How far a group is."""

    next_op: int  # all operations of the group below this number have completed on this rank
    ended: int  # GPUs: operations that have ended since the join, modulo 2^32; else 0
    failed: int  # of these, those that were not carried out


class Waits(NamedTuple):
    """For how long each rank has held up this rank's device since the join, in nanoseconds: epd_group_waits."""

    ready_ns: list[int]  # until it had begun an operation that this rank had begun
    arrived_ns: list[int]  # until it was done with this rank, which was done with all others


class Counts(NamedTuple):
    """The counts of a dispatch. The arrays are int32, and stay as they are until the slot's next operation."""

    num_recv_rows: int  # M; packed: with padding
    rank_offsets: memoryview  # [R+1]
    expert_counts: memoryview  # [E/R]
    expert_offsets: Optional[memoryview]  # [E/R+1]; None if compact
