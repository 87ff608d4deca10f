"""The structs, functions and numbers of epd.h, for ctypes.

`tests/python/test_abi.py` compiles a C program against epd.h and compares every size, offset, number and
function name with what is here.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_char, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p

FOREVER = -1  # timeout_ms: until the operation has ended
NO_WAIT = -2  # timeout_ms: look and return at once
ANY_RANK = -1
NO_STREAM = ctypes.c_size_t(-1).value  # the address that stands for "in no stream"

c_enum = c_uint32  # the enums of epd.h have no negative number: gcc and clang take unsigned int


class AttachOptions(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("socket_path", c_char_p),
        ("device", c_char_p),
        ("timeout_ms", c_int32),
        ("wait_by", c_enum),
    ]


class SessionInfo(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("session_id", c_uint64),
        ("device", c_char * 32),
        ("daemon", c_char * 64),
        ("boot_id", c_char * 33),
        ("device_kind", c_enum),
    ]


class RowFormat(ctypes.Structure):
    _fields_ = [("payload", c_enum), ("scale_format", c_enum)]


class GroupConfig(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        # [fields.py: GroupConfig]
        ("name", c_char_p),
        ("rank", c_int32),
        ("num_ranks", c_uint32),
        ("num_experts", c_uint32),
        ("max_tokens", c_uint32),
        ("hidden", c_uint32),
        ("topk", c_uint32),
        ("depth", c_uint32),
        ("payload", c_enum),
        ("index_type", c_enum),
        ("policy", c_enum),
        ("sms", c_uint32),
        ("timeout_ms", c_int32),
        ("layout", c_enum),
        ("scale_format", c_enum),
        ("expert_alignment", c_uint32),
        ("opaque_bytes", c_uint32),
        ("num_biases", c_uint32),
        ("num_handles", c_uint32),
        ("max_recv_rows", c_uint32),
        ("priority", c_int32),
        ("sum_ranks", c_uint32),
        ("span", c_enum),
        ("scale_layout", c_enum),
        ("range_format", c_enum),
        ("more_formats", ctypes.POINTER(RowFormat)),
        ("num_more_formats", c_uint32),
        ("shared_regions", c_uint32),
        # [end]
    ]


class GroupBytes(ctypes.Structure):
    _fields_ = [("size", c_size_t)] + [
        (name, c_uint64)
        for name in (
            "user_arena",
            "exchange_arena",
            "routing_records",
            "inboxes",
            "board",
            "results",
            "rank",
            "group",
            "routing_quota",
        )
    ]


class Buffers(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("x", c_void_p),
        ("topk_idx", c_void_p),
        ("topk_weights", c_void_p),
        ("recv_x", c_void_p),
        ("recv_scales", c_void_p),
        ("recv_topk_idx", c_void_p),
        ("recv_topk_weights", c_void_p),
        ("recv_src", c_void_p),
        ("rank_offsets", c_void_p),
        ("expert_counts", c_void_p),
        ("y", c_void_p),
        ("out", c_void_p),
        ("x_scales", c_void_p),
        ("expert_offsets", c_void_p),
        ("source_ranges", c_void_p),
        ("y_weights", c_void_p),
        ("bias", c_void_p * 2),
        ("out_weights", c_void_p),
    ]


class ResumeInfo(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("epoch", c_uint64),
        ("resume_op", c_uint64),
        ("num_active_ranks", c_uint32),
        ("reserved", c_uint32),
    ]


class Progress(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("next_op", c_uint64), ("ended", c_uint32), ("failed", c_uint32)]


class Memory(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("x", c_void_p),
        ("x_scales", c_void_p),
        ("topk_idx", c_void_p),
        ("topk_weights", c_void_p),
        ("recv_x", c_void_p),
        ("recv_scales", c_void_p),
        ("recv_topk_idx", c_void_p),
        ("recv_topk_weights", c_void_p),
        ("recv_src", c_void_p),
        ("rank_offsets", c_void_p),
        ("expert_counts", c_void_p),
        ("expert_offsets", c_void_p),
        ("source_ranges", c_void_p),
        ("y", c_void_p),
        ("y_weights", c_void_p),
        ("bias", c_void_p * 2),
        ("out", c_void_p),
        ("out_weights", c_void_p),
        ("recv_rows", c_uint32),
        ("reserved", c_uint32),
    ]


class DispatchArgs(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("slot", c_uint32),
        ("num_tokens", c_uint32),
        ("handle", c_uint64),
        ("num_tokens_at", c_void_p),
        ("omit_weights", c_uint32),
        ("keep_handle", c_uint32),
        ("defer_receive", c_uint32),
        ("zero_padding", c_uint32),
        ("mark_unused", c_uint32),
        ("sms", c_uint32),
        ("timeout_ms", c_int32),
        ("row_format", c_uint32),
        ("memory", c_void_p),
    ]


class CombineArgs(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("handle", c_uint64),
        ("slot", c_uint32),
        ("weighted", c_uint32),
        ("num_biases", c_uint32),
        ("return_weights", c_enum),
        ("defer_receive", c_uint32),
        ("sms", c_uint32),
        ("timeout_ms", c_int32),
        ("num_tokens", c_uint32),
        ("memory", c_void_p),
        ("num_tokens_at", c_void_p),
    ]


class Result(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("status", c_enum),
        ("failed_rank", c_int32),
        ("op_index", c_uint64),
        ("num_recv_rows", c_uint32),
        ("seen_us", c_uint32),
        ("launched_us", c_uint32),
        ("done_us", c_uint32),
        ("num_dropped_selections", c_uint32),
        ("runs", c_uint32),
    ]


class Counts(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("num_recv_rows", c_uint32),
        ("rank_offsets", c_void_p),
        ("expert_counts", c_void_p),
        ("expert_offsets", c_void_p),
    ]


# The C name of each struct.
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "epd_attach_options": AttachOptions,
    "epd_session_info_s": SessionInfo,
    "epd_row_format": RowFormat,
    "epd_group_config": GroupConfig,
    "epd_group_bytes_s": GroupBytes,
    "epd_buffers": Buffers,
    "epd_resume_info": ResumeInfo,
    "epd_progress": Progress,
    "epd_memory": Memory,
    "epd_dispatch_args": DispatchArgs,
    "epd_combine_args": CombineArgs,
    "epd_result": Result,
    "epd_counts": Counts,
}

_PACK_CODES = {c_uint64: "Q", c_size_t: "N", c_uint32: "I", c_int32: "i", c_void_p: "P"}


def pack_format(kind: type[ctypes.Structure]) -> struct.Struct:
    """The same struct for the module `struct`: one call fills all fields, or reads them, in order."""
    packed = struct.Struct("@" + "".join(_PACK_CODES[field[1]] for field in kind._fields_))
    if packed.size != ctypes.sizeof(kind):
        raise ImportError(f"{kind.__name__} is {ctypes.sizeof(kind)} bytes, its pack format {packed.size}")
    return packed


_ENUM_STATUS = c_int  # what every call that can fail returns

# Name: (result, arguments). Addresses are plain integers.
FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "epd_version": (c_char_p, ()),
    "epd_status_name": (c_char_p, (c_int,)),
    "epd_last_error": (c_char_p, ()),
    "epd_session_attach": (_ENUM_STATUS, (c_void_p, c_void_p)),
    "epd_session_detach": (_ENUM_STATUS, (c_void_p,)),
    "epd_session_info": (_ENUM_STATUS, (c_void_p, c_void_p)),
    "epd_session_check": (_ENUM_STATUS, (c_void_p,)),
    "epd_memory_register": (_ENUM_STATUS, (c_void_p, c_void_p, c_size_t)),
    "epd_memory_unregister": (_ENUM_STATUS, (c_void_p, c_void_p)),
    "epd_group_join": (_ENUM_STATUS, (c_void_p, c_void_p, c_void_p)),
    "epd_region_bytes": (_ENUM_STATUS, (c_void_p, c_int, c_void_p)),
    "epd_group_bytes": (_ENUM_STATUS, (c_void_p, c_int, c_void_p)),
    "epd_group_leave": (_ENUM_STATUS, (c_void_p,)),
    "epd_group_rank": (c_uint32, (c_void_p,)),
    "epd_group_sum_ranks": (c_uint32, (c_void_p,)),
    "epd_group_active": (c_int, (c_void_p, c_uint32)),
    "epd_group_active_mask": (_ENUM_STATUS, (c_void_p, c_void_p)),
    "epd_group_waits": (_ENUM_STATUS, (c_void_p, c_void_p, c_void_p)),
    "epd_group_buffers": (_ENUM_STATUS, (c_void_p, c_uint32, c_void_p)),
    "epd_group_advance": (_ENUM_STATUS, (c_void_p, c_void_p, c_int32, c_void_p, c_void_p)),
    "epd_group_restore": (_ENUM_STATUS, (c_void_p, c_int32, c_void_p)),
    "epd_group_check": (_ENUM_STATUS, (c_void_p, c_void_p)),
    "epd_dispatch": (_ENUM_STATUS, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
    "epd_handle_release": (_ENUM_STATUS, (c_void_p, c_uint64)),
    "epd_combine": (_ENUM_STATUS, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "epd_noop": (_ENUM_STATUS, (c_void_p, c_uint32, c_void_p, c_void_p)),
    "epd_ticket_wait": (_ENUM_STATUS, (c_void_p, c_uint64, c_int32, c_void_p)),
    "epd_ticket_pending": (c_int, (c_void_p, c_uint64)),
    "epd_ticket_counts": (_ENUM_STATUS, (c_void_p, c_uint64, c_int32, c_void_p)),
    "epd_ticket_wait_sent": (_ENUM_STATUS, (c_void_p, c_uint64, c_int32)),
    "epd_ticket_event": (_ENUM_STATUS, (c_void_p, c_uint64, c_void_p)),
    "epd_ticket_wait_on_stream": (_ENUM_STATUS, (c_void_p, c_uint64, c_void_p)),
    "epd_ticket_drop": (_ENUM_STATUS, (c_void_p, c_uint64)),
}

# Functions of epd.h that this package does not call. epd_ticket_poll is epd_ticket_wait with NO_WAIT, and
# epd_group_resume is epd_group_advance without a ticket. A hook of epd_ticket_on_complete runs on a thread of the
# library, which may outlive the interpreter: see Ticket.on_complete.
NOT_CALLED = ("epd_ticket_poll", "epd_group_resume", "epd_ticket_on_complete")
