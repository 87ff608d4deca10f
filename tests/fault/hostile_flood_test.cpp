// Clients that do too much, or stop in the middle: floods of every channel, completions that nobody drains,
// half handshakes, inputs that change under the engine's eyes. Each meets back-pressure, a quota or a
// deadline; the bystander notices nothing but a busier machine.
#include "hostile_fixture.h"
#include "support/send_descriptors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

namespace epd::test {
namespace {

using abi::AttachType;

constexpr double kFloodS = 0.6;

template <typename Body>
void flood(const Body& body) {
  for (const double end = now_s() + kFloodS; now_s() < end;) body();
}

class HostileFlood : public Hostile {};

// ---- rings and doorbells

TEST_F(HostileFlood, AFloodOfCallsIsServedInTurn) {
  const auto attacker = [&](const char* device) {
    return [this, device] {
      HostileSession session(socket(), device);
      const abi::Joined joined = session.join(std::string("flood-") + (device + 5));
      flood([&] {
        while (session.made(joined) - session.ended(joined) < abi::kCallSlots)
          session.push(joined, session.noop(joined));
      });
      RANK_CHECK(session.ended(0).empty(), session.ended(0));
      RANK_CHECK(eventually(10, [&] { return session.ended(joined) == session.made(joined); }),
                 "noops without an answer");
      std::printf("flood of %s: %u noops\n", device, session.made(joined));
    };
  };
  attack({attacker("host:0"), attacker("host:1")});
}

TEST_F(HostileFlood, AnOverwrittenRingOnlyHurtsItsOwner) {
  attack([&] {
    HostileSession session(socket(), "host:0");
    const abi::Joined joined = session.join("overrun");
    // Far more than fit, without a look at what was taken: places change while they are read.
    flood([&] {
      for (int i = 0; i < 1000; ++i) session.push(joined, session.noop(joined));
    });
    // The engine finds calls that lie where others should.
    must_hold(session.ended(), {"INVALID_ARGUMENT", "call field number is"});
  });
}

TEST_F(HostileFlood, AFloodOfTheDoorbellWakesNobodyElse) {
  attack([&] {
    const HostileSession session(socket(), "host:0");
    std::uint64_t rings = 0;
    const std::uint64_t one = 1;
    flood([&] {
      for (int i = 0; i < 1000; ++i) rings += ::write(session.bell(), &one, sizeof(one)) > 0;
    });
    RANK_CHECK(session.ended(0).empty(), session.ended(0));
    // Full again and again, and blocking for everybody who reads or writes it plainly.
    const std::uint64_t most = ~std::uint64_t{0} - 1;
    const int flags = ::fcntl(session.bell(), F_GETFL);
    for (int i = 0; i < 100; ++i) {
      RANK_CHECK(::fcntl(session.bell(), F_SETFL, flags) == 0, "F_SETFL");
      (void)::write(session.bell(), &most, sizeof(most));
      RANK_CHECK(::fcntl(session.bell(), F_SETFL, flags & ~O_NONBLOCK) == 0, "F_SETFL");
      sleep_ms(1);
    }
  });
}

// ---- the attach socket

TEST_F(HostileFlood, ConnectionsThatSayNothingAreFewAndEnd) {
  if (!root()) GTEST_SKIP() << "needs root, to become another user";
  attack([&] {
    become(kMallory);
    // Each is answered: malformed, quota, or deadline.
    const auto is_over_quota = [](const RawClient& client) {
      const std::string text = refusal(client.receive(10));
      RANK_CHECK(text != "no answer", "a connection without an answer");
      RANK_CHECK(client.closed_within(10), "and closed");
      return text.rfind("RESOURCE_EXHAUSTED", 0) == 0;
    };
    for (int i = 0; i < 50; ++i) {
      const RawClient client(socket());
      RANK_CHECK(client.valid(), "connect");
      (void)client.send_bytes("half a Hello", 1 + i % 8);  // and stops
      (void)is_over_quota(client);
    }
    // Those that say nothing come at once: the quota must be full before the first one's time is over.
    std::vector<std::unique_ptr<RawClient>> silent;
    for (int i = 0; i < 50; ++i) {
      silent.push_back(std::make_unique<RawClient>(socket()));
      RANK_CHECK(silent.back()->valid(), "connect");
    }
    std::uint32_t refused = 0;
    for (const auto& client : silent) refused += is_over_quota(*client) ? 1 : 0;
    RANK_CHECK(refused > 0, "the quota of connections without Hello refused none");
    std::printf("50 silent connections: %u over the quota\n", refused);
  });
  expect_logged("has 32 connections without Hello");
  expect_logged("no Hello within");
}

// 180 sessions of one user, groups of 2 and of 1,024 ranks by the ten thousand.
TEST_F(HostileFlood, AStormOfJoinsTakesItsUsersShareOfEachTurn) {
  attack([&] {
    std::vector<std::unique_ptr<HostileSession>> sessions;
    for (int i = 0; i < 100; ++i) sessions.push_back(std::make_unique<HostileSession>(socket(), "host:0"));
    std::mt19937 random(1);
    std::uint32_t sent = 0;
    flood([&] {
      for (const auto& session : sessions) {
        abi::Join join = HostileSession::good_join("storm-" + std::to_string(random() % 200));
        join.shape.num_ranks = random() % 2 == 0 ? 2 : 1024;
        join.shape.num_experts = 1024;
        join.rank = static_cast<std::int32_t>(random() % join.shape.num_ranks);
        join.timeout_ms = 1 + random() % 300;
        (void)send_packet(session->socket(), static_cast<std::uint16_t>(AttachType::kJoin), ++sent, &join,
                          sizeof(join));
        for (Packet packet;;) {
          Status error;
          if (receive_packet(session->socket(), packet, error) != ReceiveResult::kPacket) break;
        }
      }
    });
    std::printf("storm: %u joins\n", sent);
  });
}

TEST_F(HostileFlood, AFloodOfRequestsThatReadsNoAnswersIsHungUpOn) {
  attack([&] {
    const HostileSession session(socket(), "host:0");
    const abi::Leave leave{12345, 0};
    std::uint64_t requests = 0;
    const bool closed = eventually(20, [&] {
      for (int i = 0; i < 200; ++i) {
        const Status sent = send_packet(session.socket(), static_cast<std::uint16_t>(AttachType::kLeave), 1,
                                        &leave, sizeof(leave));
        if (sent.ok()) ++requests;
        if (!sent.ok() && sent.code() != StatusCode::kWouldBlock) return true;
      }
      return false;
    });
    RANK_CHECK(closed, "the daemon listens to " + std::to_string(requests) + " requests without hanging up");
  });
}

TEST_F(HostileFlood, AFloodOfDescriptorsIsClosed) {
  attack([&] {
    std::vector<int> fds(200, STDERR_FILENO);
    abi::WireHeader header{abi::kWireMagic, static_cast<std::uint16_t>(AttachType::kHello), 200,
                           sizeof(header), 1};
    for (int i = 0; i < 100; ++i) {
      const RawClient client(socket());
      RANK_CHECK(send_descriptors(client.fd(), &header, sizeof(header), fds) > 0, std::strerror(errno));
      must_hold(refusal(client.receive(10)), {"INVALID_ARGUMENT", "descriptors"});
    }
  });  // TearDown counts the supervisor's descriptors
}

// ---- inputs that change

// The attackers' group of two ranks: its own results are its own affair, but each operation must end.
void run_with_changing_inputs(const std::string& socket, const std::string& device, std::uint32_t rank) {
  Case c = fault_case(2, 1);
  const Session session(socket, device);
  const Group group(session, c.config("changing", rank));
  const epd_buffers_t buffers = group.buffers(0);
  std::atomic<bool> stop = false;
  std::thread scribbler([&] {
    std::mt19937_64 random(rank);
    const std::size_t choices = std::size_t{c.max_tokens} * c.topk;
    auto* indices = static_cast<std::int32_t*>(buffers.topk_idx);
    while (!stop) {
      const std::uint64_t bits = random();
      // Mostly experts that exist: such dispatches are taken for good, and change all the same.
      const auto value = static_cast<std::int32_t>(bits % 64 == 0 ? bits >> 32 : bits >> 32 & 7u);
      std::atomic_ref(indices[bits >> 8 & (choices - 1)]).store(value, std::memory_order_relaxed);
      std::atomic_ref(reinterpret_cast<std::uint32_t*>(buffers.topk_weights)[bits >> 16 & (choices - 1)])
          .store(static_cast<std::uint32_t>(bits >> 20), std::memory_order_relaxed);
      if (bits % 8192 == 0) (void)::madvise(buffers.topk_idx, 4096, MADV_REMOVE);
    }
  });
  epd_result_t result;
  epd_result_init(&result);
  const auto run = [&](const auto& submit) {
    epd_ticket_t ticket = 0;
    const epd_status_t submitted = submit(&ticket);
    return submitted == EPD_OK ? group.wait(ticket, 20000, &result) : submitted;
  };
  std::uint64_t done = 0;
  std::uint64_t failed = 0;
  const double end = now_s() + kFloodS;
  std::string trouble;
  while (now_s() < end && trouble.empty()) {
    epd_dispatch_args_t dispatch;
    epd_dispatch_args_init(&dispatch);
    dispatch.num_tokens = c.max_tokens;
    dispatch.timeout_ms = 300;
    epd_handle_t handle = 0;
    epd_status_t status =
        run([&](epd_ticket_t* ticket) { return group.dispatch(&dispatch, ticket, &handle); });
    if (status == EPD_OK) {
      if (result.num_recv_rows > 2 * c.max_tokens) trouble = std::to_string(result.num_recv_rows) + " rows";
      epd_combine_args_t combine;
      epd_combine_args_init(&combine);
      combine.handle = handle;
      combine.weighted = 1;
      combine.timeout_ms = 300;
      status = run([&](epd_ticket_t* ticket) { return group.combine(&combine, ticket); });
    }
    ++(status == EPD_OK ? done : failed);
    if (status == EPD_OK) continue;
    const bool typed = status == EPD_INVALID_ARGUMENT || status == EPD_DEADLINE_EXCEEDED ||
                       status == EPD_ABORTED || status == EPD_NOT_FOUND || status == EPD_RANK_LOST;
    if (!typed) trouble = std::string(epd_status_name(status)) + ": " + epd_last_error();
    epd_resume_info_t info;
    epd_resume_info_init(&info);
    if (epd_group_resume(group.get(), 500, &info) != EPD_OK) break;  // the other rank has gone
  }
  stop = true;
  scribbler.join();
  RANK_CHECK(trouble.empty(), trouble);
  RANK_CHECK(epd_session_check(session.get()) == EPD_OK, epd_last_error());
  std::printf("changing inputs, rank %u: %llu ok, %llu refused\n", rank,
              static_cast<unsigned long long>(done), static_cast<unsigned long long>(failed));
  RANK_CHECK(done + failed > 0, "nothing was tried");
}

TEST_F(HostileFlood, IndicesThatChangeUnderTheEnginesEyes) {
  attack({[&] { run_with_changing_inputs(socket(), "host:0", 0); },
          [&] { run_with_changing_inputs(socket(), "host:1", 1); }});
}

}  // namespace
}  // namespace epd::test
