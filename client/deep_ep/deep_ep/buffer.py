"""Buffer: DeepEP's interface."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable, Optional, Union

import torch
from torch import Tensor

import epd
from epd._handles import NotCopied
from epd.torch._dynamo import breaks_graphs, hide

from .checks import check_kind, check_number, check_tensor, not_served, refuse
from .config import Config, low_latency_bytes
from .events import EventHandle, EventOverlap
from .given import Rows
from .groups import Groups
from .layout import dispatch_layout, note_layout, topk_idx_t
from .low_latency import BF16_ROWS, FP8_ROWS, POW2_ROWS, UE8M0_ROWS, LowLatencyMode
from .masks import Masks
from .normal import NormalMode
from .streams import Streams
from .team import Team

_MOST_RANKS = 160
Handle = tuple[Any, ...]  # handles.py


@breaks_graphs
class Buffer(NotCopied):
    """Dispatch and combine among the ranks of a process group, through the node's epd daemon.

    Attributes:
        group, rank, group_size: the process group, this rank's number in it, its size
        num_nvl_bytes, num_rdma_bytes, enable_shrink: as given
        num_sms: of the class: the SMs that normal operations may use
    """

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        use_fabric: bool = False,
    ) -> None:
        """Attaches to the daemon ($EPD_SOCKET). Every rank of the process group makes its Buffer at the same time.

        group                a torch.distributed process group of any backend; None: comm
        comm                 an mpi4py communicator in place of group
        explicitly_destroy   destroy() ends the Buffer; else its end is its collection
        enable_shrink        low-latency mode goes on without ranks that end, or that an operation has waited for until its
                             deadline; ranks can be masked. The CPU then waits for each operation
        num_nvl_bytes, num_rdma_bytes, num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric: not
                             needed
        """
        team = Team(group, comm)
        self.group = group
        self.rank = team.rank
        self.group_size = team.size
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self._team = team
        self._process = os.getpid()
        self._groups: Optional[Groups] = Groups(team, num_nvl_bytes, num_rdma_bytes, enable_shrink)
        self._streams = Streams(self._groups.device)
        self._masks = Masks(self._groups, self._streams) if enable_shrink else None
        self._normal = NormalMode(team, self._groups, self._streams)
        self._low_latency = LowLatencyMode(self._groups, self._streams, self._masks)

    def destroy(self) -> None:
        """Ends the Buffer, on all ranks at the same time. Views that are alive keep their memory.

        Raises Aborted, when it has ended: the ranks did not meet, as one is gone.
        """
        if not self.explicitly_destroy:
            raise epd.InvalidArgument(
                "destroy() is called, and the Buffer was made with explicitly_destroy=False; allowed: True, or no call"
            )
        groups = self._check()
        try:
            if not groups.on_host:
                torch.cuda.synchronize(groups.device)
            if not self._low_latency.meet():
                self._team.gather(None)  # nobody needs this rank any more
        finally:
            self._groups = None
            groups.leave()

    # ---- what needs no Buffer ----------------------------------------------------------------------

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether rows of e4m3 are served."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """The SMs that normal operations may use, an even number."""
        check_number("new_num_sms", new_num_sms, 2, "even numbers from 2", multiple=2)
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that the daemon makes for a rank in low-latency mode with bf16 rows."""
        return low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """A Config of Buffer.num_sms SMs."""
        return _config(num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """A Config of Buffer.num_sms SMs."""
        return _config(num_ranks)

    # ---- streams and memory ------------------------------------------------------------------------

    def get_comm_stream(self) -> Any:
        """The Buffer's own stream; None on host devices."""
        self._check()
        return self._streams.comm

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: Optional[torch.Size] = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """A tensor of its own: epd has no buffer to look into. size None: as many bytes as the Buffer was given."""
        groups = self._check()
        if size is None:
            given = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
            width = torch.empty(0, dtype=dtype).element_size()
            offset = check_number("offset", offset, 0, "0 or more")
            size = torch.Size([max(given // width - offset, 0)])
        return torch.empty(size, dtype=dtype, device=groups.device)

    # ---- normal mode -------------------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Optional[Tensor], Tensor, Tensor, EventOverlap]:
        """The ranks that get tokens by topk_idx [n, K] int64 (negative: no selection).

        Returns num_tokens_per_rank [R] int32, None (several nodes), num_tokens_per_expert [E] int32,
        is_token_in_rank [n, R] bool, and the event.
        """
        groups = self._check()
        check_tensor("topk_idx", topk_idx, dtypes=topk_idx_t, shape=(None, None), device=groups.device)
        call = self._streams.call(previous_event, async_finish, allocate_on_comm_stream)
        call.allocate_here = True
        with call.run():
            per_rank, per_expert, in_rank = dispatch_layout(topk_idx, num_experts, self.group_size)
        note_layout(in_rank, topk_idx)
        event = call.end([topk_idx], [per_rank, per_expert, in_rank])
        return per_rank, None, per_expert, in_rank, event

    def dispatch(
        self,
        x: Rows,
        handle: Optional[Handle] = None,
        num_tokens_per_rank: Optional[Tensor] = None,
        num_tokens_per_rdma_rank: Optional[Tensor] = None,
        is_token_in_rank: Optional[Tensor] = None,
        num_tokens_per_expert: Optional[Tensor] = None,
        topk_idx: Optional[Tensor] = None,
        topk_weights: Optional[Tensor] = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Optional[Config] = None,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Rows, Optional[Tensor], Optional[Tensor], Optional[list[int]], Optional[Handle], EventOverlap
    ]:
        """Sends each token to the ranks of its experts, once to each.

        x                      [n, H] of any type, or ([n, H] of one byte, scales [n, any] float32 or int32). bf16 and
                               e4m3 with a scale for each 128 values share a group of the daemon
        handle                 of an earlier dispatch of any Buffer of the same ranks: the same routing, no topk_idx
        is_token_in_rank, num_tokens_per_expert: of get_dispatch_layout; the first is needed without topk_idx. With
                               topk_idx a token is not sent to ranks where it is False
        topk_idx, topk_weights [n, K] int64 and float32, both or neither
        expert_alignment       counts of experts are rounded up to it
        num_worst_tokens       rows of the results, whatever comes; then nothing waits for counts

        Returns recv_x, recv_topk_idx (local numbers, -1 elsewhere), recv_topk_weights, the counts of the local
        experts, the handle (None under a handle) and the event.
        """
        self._check()
        config = _config_or_default(config)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise refuse("topk_idx and topk_weights", "given", "None under a handle")
            call = self._streams.call(previous_event, async_finish, allocate_on_comm_stream)
            rows, event = self._normal.dispatch_again(x, handle, config, call)
            return rows, None, None, None, None, event
        if topk_idx is None and topk_weights is not None:
            raise refuse("topk_idx", None, "a tensor with topk_weights")
        check_number("expert_alignment", expert_alignment, 1, "1 or more")
        call = self._streams.call(previous_event, async_finish, allocate_on_comm_stream)
        return self._normal.dispatch(
            x,
            num_tokens_per_expert,
            is_token_in_rank,
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
            config,
            call,
        )

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Optional[Tensor] = None,
        bias: Union[Tensor, tuple[Tensor, Tensor], None] = None,
        config: Optional[Config] = None,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Optional[Tensor], EventOverlap]:
        """Adds up, for each token of the handle's dispatch, the rows that its ranks answer.

        x             [M, H] bf16, one row for each received row
        topk_weights  [M, K] float32: each column is summed over the token's ranks
        bias          one or two tensors [n, H] bf16, added first

        Returns the sums [n, H] bf16, the summed weights [n, K] and the event.
        """
        self._check()
        given = bias if isinstance(bias, tuple) else (bias,)
        if len(given) > 2:
            raise refuse("bias", f"{len(given)} tensors", "at most 2")
        biases = [each for each in given if each is not None]
        config = _config_or_default(config)
        call = self._streams.call(previous_event, async_finish, allocate_on_comm_stream)
        return self._normal.combine(x, handle, topk_weights, biases, config, call)

    # ---- low-latency mode --------------------------------------------------------------------------

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing to do: epd needs no clean memory."""
        self._check()

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Optional[Tensor] = None,
        dispatch_wait_recv_cost_stats: Optional[Tensor] = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Tensor, Handle, EventOverlap, Optional[Callable[[], None]]]:
        """Sends each token to its experts.

        x         [n, H] bf16, n <= T = num_max_dispatch_tokens_per_rank, which is the same on all ranks
        topk_idx  [n, K] int64; negative: no selection
        use_fp8   rows arrive as e4m3 with a scale for each 128 values. round_scale: powers of two. use_ue8m0:
                  as bytes, four in an int32
        cumulative_local_expert_recv_stats  [E/R] int32, to which the counts are added
        dispatch_wait_recv_cost_stats       [R] int64, to which is added how long each rank was waited for, in cycles
                                            of a clock of 2 GHz. README.md says what is measured on GPUs
        return_recv_hook  the results are complete when the returned function was called

        Returns recv_x [E/R, R*T, H] (and scales [E/R, R*T, H/128], the last two dimensions column-major),
        recv_count [E/R] int32, the handle, the event and the hook. With the largest T so far these are views of a slot:
        they hold until their combine, and at most two can be held.
        """
        self._check()
        _one_of(async_finish, return_recv_hook)
        row_format = BF16_ROWS
        if use_fp8:
            if use_ue8m0 and not round_scale:
                raise refuse("round_scale", False, "True with use_ue8m0")
            row_format = UE8M0_ROWS if use_ue8m0 else POW2_ROWS if round_scale else FP8_ROWS
        return self._low_latency.dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            row_format,
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
            async_finish,
            return_recv_hook,
        )

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Optional[Tensor] = None,
        combine_wait_recv_cost_stats: Optional[Tensor] = None,
    ) -> tuple[Tensor, EventOverlap, Optional[Callable[[], None]]]:
        """Adds up each token's rows, multiplied by topk_weights [n, K].

        topk_idx   [n, K], of the dispatch; the row of a choice that is negative here is left out
        x          [E/R, R*T, H] bf16: one row for each received row
        zero_copy  the rows are in get_next_low_latency_combine_buffer(handle) already, and x is not read
        out        [n, H] bf16 for the sums; None: a new tensor
        combine_wait_recv_cost_stats  [R] int64, as of dispatch

        Returns the sums, the event and the hook.
        """
        self._check()
        _one_of(async_finish, return_recv_hook)
        if use_logfmt:
            raise not_served("use_logfmt", True, "False")
        return self._low_latency.combine(
            x,
            topk_idx,
            topk_weights,
            handle,
            zero_copy,
            async_finish,
            return_recv_hook,
            out,
            combine_wait_recv_cost_stats,
        )

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> Tensor:
        """Where the next combine with zero_copy finds its rows: [E/R, R*T, H] bf16."""
        self._check()
        return self._low_latency.next_combine_buffer(handle)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """From this rank's next dispatch on a masked rank gets no tokens from here, and its tokens do not get here.

        The combine of a dispatch goes by that dispatch. A graph keeps the masks with which it was captured. Ranks that
        are lost stay masked: NotImplementedError.
        """
        self._mutable_masks().update(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes to mask_status [R] int32: 1 for a rank that is masked or lost, else 0."""
        groups = self._check()
        size = self.group_size
        check_tensor("mask_status", mask_status, dtypes=torch.int32, shape=(size,), device=groups.device)
        if self._streams.capturing:
            raise not_served("mask_status", "asked for while the stream captures a graph", "calls that no graph has")
        if self._masks is not None:
            gone = self._masks.status()
        else:
            gone = groups.lost()
        mask_status.copy_(torch.tensor([int(rank in gone) for rank in range(size)], dtype=torch.int32, device="cpu"))

    def low_latency_clean_mask_buffer(self) -> None:
        """No rank is masked any more. Ranks that were lost because they were late are taken back, if all ranks that
        live call this; ranks that are gone stay lost. Raises epd.DeadlineExceeded: it names the ranks that have not
        called.
        """
        self._check()
        if self._masks is not None:
            self._masks.clean()

    # ---- inside ------------------------------------------------------------------------------------

    def _mutable_masks(self) -> Masks:
        self._check()
        if self._masks is None:
            raise refuse("enable_shrink", False, "True for masks of the caller's")
        return self._masks

    def _check(self) -> Groups:
        hide("deep_ep")
        if self._groups is None:
            raise epd.InvalidArgument("the Buffer is destroyed; allowed: Buffers that are not")
        if os.getpid() != self._process:
            self._groups.session.check()  # raises, and names both processes
        return self._groups


def _config(num_ranks: int) -> Config:
    check_number("num_ranks", num_ranks, 1, f"1 .. {_MOST_RANKS}")
    if num_ranks > _MOST_RANKS:
        raise refuse("num_ranks", num_ranks, f"1 .. {_MOST_RANKS}")
    return _config_of(Buffer.num_sms)


_config_of = functools.lru_cache(maxsize=8)(Config)


def _config_or_default(config: Optional[Config]) -> Config:
    if config is None:
        return _config_of(Buffer.num_sms)
    return check_kind("config", config, Config, "None, or a Config")


def _one_of(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise refuse("async_finish and return_recv_hook", "both True", "one of them")
