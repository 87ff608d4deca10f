"""deep_ep in rank processes on host devices: what DeepEP's users and its own tests rely on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Iterator

import pytest
from conftest import HOST_DEVICES, ROOT, Daemon

torch = pytest.importorskip("torch", reason="torch is not installed (Debian: python3-torch)")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

from rank_processes import RankProcesses  # noqa: E402


PATH = [str(ROOT / folder) for folder in ("client/python", "client/deep_ep", "tests/python")]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """Ranks that are missing are missed soon."""
    running = Daemon(f"{HOST_DEVICES}\ntimeouts.join_ms = 8000")
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def two(daemon: Daemon) -> Iterator[RankProcesses]:
    ranks = RankProcesses(2, daemon.socket, PATH)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def four(daemon: Daemon) -> Iterator[RankProcesses]:
    ranks = RankProcesses(4, daemon.socket, PATH)
    yield ranks
    ranks.stop()


def test_layout(two: RankProcesses) -> None:
    two.run("deep_ep_normal_cases.layout")


@pytest.mark.parametrize("form", ["bf16", "fp8", "ue8m0"])
@pytest.mark.parametrize("previous", [False, True])
@pytest.mark.parametrize("async_finish", [False, True])
def test_normal(two: RankProcesses, form: str, previous: bool, async_finish: bool) -> None:
    two.run("deep_ep_normal_cases.normal", form=form, previous=previous, async_finish=async_finish)


def test_normal_on_four_ranks_one_without_tokens(four: RankProcesses) -> None:
    four.run("deep_ep_normal_cases.normal", form="bf16", previous=False, async_finish=False)
    four.run("deep_ep_low_latency_cases.low_latency", form="fp8", hooks=True)


@pytest.mark.parametrize("case", ["dropped_tokens", "weights_of_any_width"])
def test_normal_in_use(two: RankProcesses, case: str) -> None:
    two.run(f"deep_ep_normal_cases.{case}")


def test_other_rows_under_a_handle(two: RankProcesses) -> None:
    two.run("deep_ep_normal_cases.other_rows_under_a_handle")


def test_many_handles(two: RankProcesses) -> None:
    two.run("deep_ep_normal_cases.many_handles")


@pytest.mark.parametrize("case", ["more_tokens", "more_handles", "as_many_as_there_are", "no_memory_for_more"])
def test_groups_grow(two: RankProcesses, case: str) -> None:
    """They grow with the tokens of a rank and the handles that live, which were limits (8192 and 256)."""
    two.run(f"deep_ep_growth_cases.{case}")


@pytest.mark.parametrize("kind", ["views", "copies", "shrink"])
def test_fewer_tokens_use_the_group_of_more(two: RankProcesses, kind: str) -> None:
    """Each num_max_dispatch_tokens_per_rank had a group of its own, as long as the Buffer lived."""
    two.run("deep_ep_growth_cases.fewer_low_latency_tokens", kind=kind)


@pytest.mark.parametrize("form", ["bf16", "fp8", "pow2", "ue8m0"])
@pytest.mark.parametrize("hooks, async_finish", [(False, False), (True, False), (False, True)])
def test_low_latency(two: RankProcesses, form: str, hooks: bool, async_finish: bool) -> None:
    two.run("deep_ep_low_latency_cases.low_latency", form=form, hooks=hooks, async_finish=async_finish)


@pytest.mark.parametrize(
    "case",
    [
        "left_out_rows",
        "two_batches",
        "batches_take_turns",
        "modes_of_torch_change",
        "hooks_that_are_not_called",
        "a_hook_is_interrupted",
        "a_hook_of_what_has_failed",
        "results_are_copies",
        "results_that_callers_change",
    ],
)
def test_low_latency_in_use(two: RankProcesses, case: str) -> None:
    two.run(f"deep_ep_low_latency_cases.{case}")


@pytest.mark.skipif(
    not hasattr(torch, "compile"), reason=f"torch {torch.__version__} has no torch.compile (2.0 has)"
)
def test_first_calls_under_dynamo(two: RankProcesses) -> None:
    two.run("deep_ep_low_latency_cases.first_calls_under_dynamo")


@pytest.mark.parametrize(
    "case",
    [
        "both_modes",
        "names",
        "buffers_end_in_any_order",
        "memberships_end_with_the_buffer",
        "it_ends_without_the_others",
        "in_a_forked_child",
        "mpi",
    ],
)
def test_buffers(two: RankProcesses, case: str) -> None:
    two.run(f"deep_ep_buffer_cases.{case}")


def test_rows_of_other_types(two: RankProcesses) -> None:
    two.run("deep_ep_normal_cases.rows_of_other_types")


def test_hidden_sizes(two: RankProcesses) -> None:
    two.run("deep_ep_normal_cases.hidden_sizes")


def test_handles_in_other_forms(two: RankProcesses) -> None:
    """Taken apart and put together again, copied, pickled, kept by autograd; with another Buffer and without theirs."""
    two.run("deep_ep_handle_cases.normal")
    two.run("deep_ep_handle_cases.normal_without_topk_idx")
    two.run("deep_ep_handle_cases.normal_written_to")
    two.run("deep_ep_handle_cases.normal_established_later")


@pytest.mark.parametrize("views", [False, True])
def test_low_latency_handles_in_other_forms(two: RankProcesses, views: bool) -> None:
    two.run("deep_ep_handle_cases.low_latency", views=views)


def test_choices_that_combine_leaves_out(two: RankProcesses) -> None:
    two.run("deep_ep_handle_cases.choices_that_are_written_to")


def test_what_is_no_handle(two: RankProcesses) -> None:
    two.run("deep_ep_handle_cases.wrong")


def test_wrong_arguments(two: RankProcesses) -> None:
    two.run("deep_ep_buffer_cases.wrong_arguments")


def test_ranks_that_differ(two: RankProcesses) -> None:
    """In num_max_dispatch_tokens_per_rank: each is told which value differs, and on which rank."""
    differs = "max_tokens is (10|9), but the ranks already in group .* have (10|9)"
    answers = two.run("deep_ep_buffer_cases.other_values_on_ranks")
    assert sum(bool(re.match(f"InvalidArgument: .*{differs}", answer)) for answer in answers) == 1, answers
    missed = f"DeadlineExceeded: .* missing: ([01]); rank \\1 was refused: {differs}"
    assert sum(bool(re.match(missed, answer)) for answer in answers) == 1, answers


def test_a_rank_has_no_buffer(two: RankProcesses) -> None:
    other, own = (text.splitlines() for text in two.run("deep_ep_buffer_cases.a_rank_has_no_buffer"))
    assert len(own) == len(other) == 2
    for said, told in zip(own, other):
        assert told == f"Aborted: ABORTED: the Buffer could not be made on rank 1: {said}"


def test_a_rank_ends(two: RankProcesses) -> None:
    assert two.run("deep_ep_buffer_cases.a_rank_ends") == ["lost 1", "left"]


def test_what_is_exported() -> None:
    code = (
        "import deep_ep, deep_ep.utils\n"
        "from deep_ep import Buffer, Config, EventOverlap, EventHandle, topk_idx_t\n"
        "from deep_ep.utils import EventHandle as Handle, EventOverlap as Overlap\n"
        "from deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8, calc_diff\n"
        "from deep_ep.utils.testing import bench, bench_kineto\n"
        "from deep_ep.utils.envs import init_dist\n"
        "assert (Handle, Overlap) == (EventHandle, EventOverlap)\n"
        "import deep_ep_cpp\n"  # DeepEP installs it, and XTuner imports it
        "assert (deep_ep_cpp.Config, deep_ep_cpp.EventHandle) == (Config, EventHandle)\n"
        "assert deep_ep_cpp.get_low_latency_rdma_size_hint(128, 2880, 2, 32) > 0 and deep_ep_cpp.is_sm90_compiled()\n"
        "config = Config(24, 8, 256)\n"
        "assert config.get_nvl_buffer_size_hint(7168 * 2, 2) > 0 == config.get_rdma_buffer_size_hint(7168 * 2, 2)\n"
        "assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 2, 288) > 2 * 144 * 256 * 7168 * 2\n"
        "Buffer.set_num_sms(24)\n"
        "assert Buffer.get_dispatch_config(2).num_sms == Buffer.get_combine_config(8).num_sms == 24\n"
        "assert Buffer.is_sm90_compiled() and str(topk_idx_t) == 'torch.int64'\n"
        "with Buffer.capture() as event: event.current_stream_wait()\n"
    )
    environment = {**os.environ, "PYTHONPATH": ":".join(PATH)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)
