// Every device must do the same when ranks disagree, don't come, or leave: it gives the right status with the
// rank and the values on every rank, and the group continues afterwards.
#include "conformance.h"

#include <cstring>

namespace epd::test {
namespace {

class Failures : public Conformance {};
INSTANTIATE_TEST_SUITE_P(Devices, Failures,
                         testing::ValuesIn(kinds_here({{"host", "cuda", "cuda_in_streams"}, {}})),
                         [](const auto& tested) { return tested.param; });

Case small_case(std::uint32_t num_ranks, std::uint32_t depth = 2) {
  Case c;
  c.seed = base_seed() + 5000;
  c.num_ranks = num_ranks;
  c.num_experts = num_ranks * 2;
  c.max_tokens = 8;
  c.depth = depth;
  c.sizes = Sizes::kFull;
  return c;
}

struct Expected {
  epd_status_t status;
  std::vector<std::string> words;  // all of them are in the message
  std::int32_t failed_rank = -1;   // -1: not checked
};

void check_said(const Expected& want) {
  for (const std::string& word : want.words) must_say(word);
}

void must_fail(const Group& group, epd_ticket_t ticket, const Expected& want) {
  epd_result_t result;
  epd_result_init(&result);
  must(group.wait(ticket, kWaitMs, &result), "the operation", want.status);
  check_said(want);
  RANK_CHECK(want.failed_rank < 0 || result.failed_rank == want.failed_rank,
             "the failed_rank is " + std::to_string(result.failed_rank) + ", not " +
                 std::to_string(want.failed_rank));
}

// `submitted` is what the submission gave: the failure itself, or a ticket that ends with it.
void must_fail_soon(const Group& group, epd_status_t submitted, epd_ticket_t ticket, const Expected& want) {
  if (submitted == EPD_OK) {
    must_fail(group, ticket, want);
  } else {
    must(submitted, "a submission to the broken group", want.status);
    check_said(want);
  }
}

// The group is known to be broken, this rank may not have seen it yet: its next submission is refused with
// the group's status, or ends with it.
void must_be_broken(const Group& group, const Expected& want) {
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.timeout_ms = 20000;
  epd_ticket_t ticket = 0;
  const epd_status_t submitted = group.dispatch(&args, &ticket, nullptr);
  must_fail_soon(group, submitted, ticket, want);
}

std::uint64_t resume(const Group& group) {
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  must(epd_group_resume(group.get(), 20000, &info), "resume");
  return info.resume_op;
}

// After `done` operations the group must continue with that number, and give right results.
void must_go_on(const Group& group, const Case& c, std::uint32_t rank, std::uint64_t done) {
  const std::uint64_t resume_op = resume(group);
  RANK_CHECK(resume_op == done,
             "resume_op is " + std::to_string(resume_op) + ", not " + std::to_string(done));
  for (std::uint64_t round = 20; round < 24; ++round) one_round(group, c, rank, round);
}

void set_choice(const Case& c, const epd_buffers_t& buffers, std::size_t at, std::int64_t value) {
  if (c.index64) {
    static_cast<std::int64_t*>(buffers.topk_idx)[at] = value;
  } else {
    static_cast<std::int32_t*>(buffers.topk_idx)[at] = static_cast<std::int32_t>(value);
  }
}

TEST_P(Failures, AHandleOfNoRecordIsNotFoundAndHarmless) {
  const Case c = small_case(2);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    epd_handle_t old_handle = 0;
    epd_handle_t new_handle = 0;
    finish_dispatch(group, c, rank, 0, 0, submit_dispatch(group, c, rank, 0, 0, &old_handle));
    finish_dispatch(group, c, rank, 0, 1, submit_dispatch(group, c, rank, 0, 1, &new_handle));
    RANK_CHECK(old_handle == new_handle, "handles name records");
    epd_combine_args_t args;
    epd_combine_args_init(&args);
    epd_ticket_t ticket = 0;
    for (const epd_handle_t bad : {epd_handle_t{0}, new_handle + 1, ~epd_handle_t{0}}) {
      args.handle = bad;
      must(group.combine(&args, &ticket), "handle " + std::to_string(bad), EPD_NOT_FOUND);
      must_say(std::to_string(bad));
    }
    finish_combine(group, c, rank, 0, 1, submit_combine(group, c, rank, 0, 1, new_handle));
  });
}

TEST_P(Failures, ABadChoiceIsNamedOnEveryRank) {
  for (const bool index64 : {false, true}) {
    Case c = small_case(3);
    c.index64 = index64;
    const std::int64_t values[] = {6, 0x7ffffffe, index64 ? (std::int64_t{1} << 32) + 1 : 0x7fffffff};
    Shared<Gate> even;
    with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
      std::uint64_t done = 0;
      std::uint32_t turn = 0;
      for (const std::int64_t value : values) {
        one_round(group, c, rank, 0);
        done += 2;
        // The bad choice breaks the group at once; a peer's combine must not be caught in it.
        even->meet(++turn * c.num_ranks);
        const Input input = make_input(c, rank, 1);
        fill_dispatch(c, group.buffers(0), input);
        if (rank == 1) set_choice(c, group.buffers(0), std::size_t{5} * c.topk + 1, value);
        epd_dispatch_args_t args;
        epd_dispatch_args_init(&args);
        args.num_tokens = input.num_tokens;
        const Expected want{EPD_INVALID_ARGUMENT, {"topk_idx[5,1] is " + std::to_string(value), "rank 1"}, 1};
        // A rank that comes late finds the group broken already.
        epd_ticket_t ticket = 0;
        const epd_status_t submitted = group.dispatch(&args, &ticket, nullptr);
        must_fail_soon(group, submitted, ticket, want);
        must_be_broken(group, {want.status, want.words});
        must_go_on(group, c, rank, done);
        done += 8;
      }
    });
  }
}

TEST_P(Failures, DifferentOperationsAreNamedOnEveryRank) {
  const Case c = small_case(3);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    epd_handle_t handle = 0;
    finish_dispatch(group, c, rank, 0, 0, submit_dispatch(group, c, rank, 0, 0, &handle));
    const epd_ticket_t ticket =
        rank == 2 ? submit_combine(group, c, rank, 0, 0, handle) : submit_dispatch(group, c, rank, 0, 1);
    must_fail(group, ticket, {EPD_INVALID_ARGUMENT, {"op", "dispatch", "combine", "rank 2"}});
    must_go_on(group, c, rank, 1);
  });
}

TEST_P(Failures, DifferentSlotsAreNamedOnEveryRank) {
  const Case c = small_case(3, 4);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    const epd_ticket_t ticket = submit_dispatch(group, c, rank, rank == 1 ? 3 : 2, 0);
    must_fail(group, ticket, {EPD_INVALID_ARGUMENT, {"slot", "3", "2", "rank 1"}});
    must_go_on(group, c, rank, 0);
  });
}

TEST_P(Failures, ARankThatDoesNotComeIsNamedAtTheDeadline) {
  const Case c = small_case(4, 3);
  Shared<Gate> ready;
  Shared<Gate> failed;
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    one_round(group, c, rank, 0);
    const Expected want{EPD_DEADLINE_EXCEEDED, {"rank 2"}, 2};
    if (rank != 2) {
      ready->meet(3);  // all have submitted before the first one's deadline
      std::vector<epd_ticket_t> tickets;
      for (std::uint32_t slot = 0; slot < c.depth; ++slot)
        tickets.push_back(submit_dispatch(group, c, rank, slot, slot, nullptr, 3000));
      for (const epd_ticket_t ticket : tickets) must_fail(group, ticket, {want.status, {}});
      failed->arrive();
    } else {
      failed->wait_for(3);
    }
    must_be_broken(group, {want.status, {}});
    must_go_on(group, c, rank, 2);
  });
}

TEST_P(Failures, TheDeadlinesMessageNamesTheRank) {
  const Case c = small_case(2);
  Shared<Gate> failed;
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    if (rank == 0) {
      const epd_ticket_t ticket = submit_dispatch(group, c, rank, 0, 0, nullptr, 200);
      must_fail(group, ticket, {EPD_DEADLINE_EXCEEDED, {"rank 1", "operation 0"}, 1});
      failed->arrive();
    } else {
      failed->wait_for(1);
    }
    must_go_on(group, c, rank, 0);
  });
}

// ---- routings ----------------------------------------------------------------------------------

TEST_P(Failures, HandlesThatAreNoMoreAreNotFound) {
  Case c = small_case(2);
  c.num_handles = 2;
  Case fewer = c;
  fewer.depth = 1;
  const std::string name = group_name();
  with_ranks(c, [&](const Session& session, const Group& group, std::uint32_t rank) {
    const Group other(session, fewer.config(name.c_str(), rank));
    const auto refused = [&](const Group& where, epd_handle_t handle, const char* why) {
      epd_combine_args_t combine;
      epd_combine_args_init(&combine);
      combine.handle = handle;
      epd_dispatch_args_t dispatch;
      epd_dispatch_args_init(&dispatch);
      dispatch.handle = handle;
      epd_ticket_t ticket = 0;
      must(where.combine(&combine, &ticket), why, EPD_NOT_FOUND);
      must_say(std::to_string(handle));
      must(where.dispatch(&dispatch, &ticket, nullptr), why, EPD_NOT_FOUND);
      must_say(std::to_string(handle));
    };
    const Input input = make_input(c, rank, 0);
    fill_dispatch(c, group.buffers(1), input);
    epd_dispatch_args_t args = dispatch_args(c, input.num_tokens);
    args.slot = 1;
    args.keep_handle = 1;
    epd_ticket_t ticket = 0;
    epd_handle_t kept = 0;
    must(group.dispatch(&args, &ticket, &kept), "dispatch");
    finish_dispatch(group, c, rank, 1, 0, ticket);
    one_round(group, c, rank, 2);  // on slot 0
    refused(other, kept, "another group's");
    refused(group, kept + 1, "of an operation that was none");
    must(epd_handle_release(other.get(), kept), "another group's", EPD_NOT_FOUND);
    finish_combine(group, c, rank, 1, 0, submit_combine(group, c, rank, 1, 0, kept));
    must(epd_handle_release(group.get(), kept), "release");
    refused(group, kept, "released");
    one_round(group, c, rank, 3);
    one_round(other, fewer, rank, 0);
  });
}

TEST_P(Failures, DifferentRoutingsAreNamedOnEveryRank) {
  Case c = small_case(3);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    epd_handle_t handles[2] = {};
    for (std::uint32_t slot = 0; slot < 2; ++slot)
      finish_dispatch(group, c, rank, slot, slot,
                      submit_dispatch(group, c, rank, slot, slot, &handles[slot]));
    const epd_ticket_t ticket = submit_combine(group, c, rank, 0, 0, handles[rank == 2 ? 1 : 0]);
    must_fail(group, ticket, {EPD_INVALID_ARGUMENT, {"rank 2"}});
    must_go_on(group, c, rank, 2);
  });
}

// Rows of one format would be read as rows of another.
TEST_P(Failures, DifferentRowFormatsAreNamedOnEveryRank) {
  for (const epd_layout_t layout : {EPD_LAYOUT_COMPACT, EPD_LAYOUT_EXPERT}) {
    Case c = small_case(3);
    c.layout = layout;
    c.more_formats = {{EPD_PAYLOAD_FP8_CAST, EPD_SCALE_FORMAT_FLOAT32}};
    with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
      const Input input = make_input(c, rank, 0);
      const auto dispatch = [&](std::uint32_t slot, std::uint32_t row_format) {
        fill_dispatch(c, group.buffers(slot), input);
        epd_dispatch_args_t args = dispatch_args(c, input.num_tokens);
        args.slot = slot;
        args.row_format = row_format;
        epd_ticket_t ticket = 0;
        must(group.dispatch(&args, &ticket, nullptr), "dispatch");
        return ticket;
      };
      must(group.wait(dispatch(0, 1), kWaitMs), "a dispatch with one format on all ranks");
      must_fail(group, dispatch(1, rank == 2 ? 1 : 0), {EPD_INVALID_ARGUMENT, {"row_format is", "rank 2"}});
      must_go_on(group, c, rank, 1);
    });
  }
}

// A rank whose rows would not fit: nobody writes beyond the room, everybody hears who, how many and how much.
TEST_P(Failures, TooManyRowsAreNamedOnEveryRank) {
  for (const epd_layout_t layout : {EPD_LAYOUT_COMPACT, EPD_LAYOUT_PACKED, EPD_LAYOUT_EXPERT}) {
    Case c = small_case(3);
    c.layout = layout;
    c.alignment = 4;
    c.topk = 1;
    c.max_recv_rows = rows_needed(c, 24);
    Case crowded = c;  // the same group, and all tokens to the last expert
    crowded.routing = Routing::kOneExpert;
    const std::uint32_t rows = c.num_ranks * c.max_tokens;
    ASSERT_LT(c.max_recv_rows, rows) << c.describe();
    with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
      one_round(group, c, rank, 0);
      const epd_ticket_t ticket = submit_dispatch(group, crowded, rank, 0, 1);
      Expected want{EPD_RESOURCE_EXHAUSTED,
                    {"rank 2", std::to_string(rows), "max_recv_rows", std::to_string(c.max_recv_rows)}};
      if (layout == EPD_LAYOUT_EXPERT) want.words.emplace_back("expert 5");
      // A rank of another node may have had all of its rows: then its next operation fails so, and the resume
      // takes it back to this one.
      const epd_status_t status = group.wait(ticket, kWaitMs);
      if (spans() && status == EPD_OK) {
        must_be_broken(group, want);
      } else {
        must(status, "the operation", want.status);
        check_said(want);
      }
      must_go_on(group, c, rank, 2);
    });
  }
}

TEST_P(Failures, FailuresInARowAreAllRecovered) {
  const Case c = small_case(3);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    for (std::uint64_t turn = 0; turn < 10; ++turn) {
      const epd_ticket_t ticket = submit_dispatch(group, c, rank, rank == turn % 3 ? 1 : 0, turn);
      must_fail(group, ticket, {EPD_INVALID_ARGUMENT, {"slot"}});
      RANK_CHECK(resume(group) == turn * 2, "turn " + std::to_string(turn));
      one_round(group, c, rank, turn);
    }
  });
}

TEST_P(Failures, ResumeOfAHealthyGroupIsOkAtOnce) {
  const Case c = small_case(2);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    RANK_CHECK(resume(group) == 0, "nothing was done yet");
    must(epd_group_resume(group.get(), EPD_NO_WAIT, nullptr), "resume without waiting");
    one_round(group, c, rank, 0);
    must(epd_group_resume(group.get(), EPD_NO_WAIT, nullptr), "resume");
    one_round(group, c, rank, 1);
  });
}

TEST_P(Failures, APeerThatLeavesIsNamedToTheOthers) {
  const Case c = small_case(3);
  const std::string name = group_name();
  Shared<Gate> ready;
  expect_all_ok(run_ranks(3, 60, [&](std::uint32_t rank) -> std::string {
    const Session session = session_of(rank);
    {
      const Group group(session, c.config(name.c_str(), rank));
      one_round(group, c, rank, 0);
      if (rank == 1) {
        ready->wait_for(2);
      } else {
        const epd_ticket_t ticket = submit_dispatch(group, c, rank, 0, 1);
        ready->arrive();
        must_fail(group, ticket, {EPD_RANK_LOST, {"rank 1"}, 1});
        epd_ticket_t other = 0;
        epd_dispatch_args_t args;
        epd_dispatch_args_init(&args);
        args.slot = 1;
        must(group.dispatch(&args, &other, nullptr), "a submission to the lost group", EPD_RANK_LOST);
        must(epd_group_resume(group.get(), 1000, nullptr), "resume of a lost group", EPD_RANK_LOST);
      }
    }
    const std::string next = name + "-next";
    const Group group(session, c.config(next.c_str(), rank));  // sessions live on
    one_round(group, c, rank, 2);
    return "";
  }));
}

}  // namespace
}  // namespace epd::test
