// The requests of an attached client, and the end of its session.
#include "common/signal.h"
#include "session_fixture.h"

#include <linux/sockios.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace epd::session {
namespace {

TEST_F(Attach, AMapBringsAsManyPiecesAsItMay) {
  const UniqueFd socket = attach();
  Result<UniqueFd> memory = make_sealed_memfd("memory", 4096);
  abi::MapMemory map{};
  map.member = 3;
  map.range.bytes = 4096;
  ask(socket, AttachType::kMapMemory, map, 7, {memory->get()});
  ASSERT_EQ(host_.maps.size(), 1u);
  ASSERT_EQ(host_.last_memory.size(), 1u);
  EXPECT_EQ(sealed_size(host_.last_memory[0].get()).value(), 4096u);
  EXPECT_EQ(host_.last_map.member, 3u);
  EXPECT_EQ(host_.last_map.range.bytes, 4096u);
  Packet packet;
  ASSERT_TRUE(send_message(socket.get(), AttachType::kMapMemory, map, {socket.get()}, 8).ok());
  ASSERT_EQ(receive(socket, packet), ReceiveResult::kPacket);
  EXPECT_NE(text_of(packet).find("the descriptor is not of memory"), std::string::npos) << text_of(packet);
  const std::vector<int> too_many(abi::kMaxPieces + 1, memory->get());
  ASSERT_TRUE(send_message(socket.get(), AttachType::kMapMemory, map, too_many, 9).ok());
  ASSERT_EQ(receive(socket, packet), ReceiveResult::kPacket);
  expect_refused_and_closed(socket, packet, {"21 descriptors", "allowed: 20"});
}

TEST_F(Attach, WhatIsToldOfRowsIsNotAnswered) {
  const UniqueFd socket = attach();
  abi::RowsTold told{3, 0, {}};
  told.counts[2] = 5;
  ASSERT_TRUE(send_message(socket.get(), AttachType::kRowsTold, told, {}, 7).ok());
  EXPECT_TRUE(pump_until([&] { return host_.last_rows.second.counts[2] == 5; }));
  EXPECT_EQ(host_.last_rows.second.member, 3u);
  EXPECT_FALSE(readable(socket));
}

TEST_F(Attach, AJoinBringsNoDescriptors) {
  const UniqueFd socket = attach();
  Result<UniqueFd> memory = make_sealed_memfd("memory", 4096);
  ASSERT_TRUE(send_message(socket.get(), AttachType::kJoin, abi::Join{}, {memory->get()}, 7).ok());
  Packet packet;
  ASSERT_EQ(receive(socket, packet), ReceiveResult::kPacket);
  expect_refused_and_closed(socket, packet, {"1 descriptors", "allowed: 0"});
  EXPECT_TRUE(host_.joins.empty());
}

TEST_F(Attach, DescriptorsFromAClientAreRefused) {
  const UniqueFd socket = connect();
  ASSERT_TRUE(send_message(socket.get(), AttachType::kHello, good_hello(), {0}).ok());
  Packet packet;
  ASSERT_EQ(receive(socket, packet), ReceiveResult::kPacket);
  expect_refused_and_closed(socket, packet, {"descriptors", "allowed: 0"});
}

TEST_F(Attach, AMalformedRequestEndsTheSessionAndSaysSoInSegmentB) {
  const UniqueFd socket = attach();
  const std::uint64_t id = welcome_.read<abi::Welcome>().value().session_id;
  const Mapping b = Mapping::map(welcome_.fds[1].get(), sizeof(abi::SegmentB), Access::kReadOnly).value();
  const Packet reply = exchange(socket, AttachType::kHello, good_hello(), 9);
  EXPECT_EQ(reply.header.request_id, 9u);
  expect_refused_and_closed(socket, reply, {"type is 1"});
  EXPECT_EQ(host_.closed, (std::vector<std::uint64_t>{id}));
  const auto* segment = b.as<abi::SegmentB>();
  EXPECT_EQ(segment->state.load(), static_cast<std::uint32_t>(abi::SessionState::kEnded));
  EXPECT_NE(std::string(segment->message).find("type is 1"), std::string::npos);
}

TEST_F(Attach, RequestsWaitForTheirRepliesInAnyOrder) {
  const UniqueFd socket = attach();
  const std::uint64_t id = welcome_.read<abi::Welcome>().value().session_id;
  abi::Join join{};
  std::strcpy(join.group, "g");
  ask(socket, AttachType::kJoin, join, 5);
  ask(socket, AttachType::kLeave, abi::Leave{1, 0}, 6);
  ask(socket, AttachType::kJoin, join, 7);
  EXPECT_EQ(host_.joins.size(), 2u);
  EXPECT_EQ(host_.leaves.size(), 1u);
  EXPECT_STREQ(host_.last_join.group, "g");
  table_->refuse(id, 4, not_found("another request"));
  for (const std::uint32_t request : {7u, 5u, 6u}) {
    table_->refuse(id, request, not_found("no such thing"));
    table_->refuse(id, request, not_found("twice"));
    Packet reply;
    ASSERT_EQ(receive(socket, reply), ReceiveResult::kPacket);
    EXPECT_EQ(text_of(reply), "NOT_FOUND: no such thing");
    EXPECT_EQ(reply.header.request_id, request);
    EXPECT_TRUE(is_silent(socket));
  }
  ask(socket, AttachType::kLeave, abi::Leave{1, 0}, 6);
  EXPECT_EQ(host_.leaves.size(), 2u);
}

TEST_F(Attach, TheIdOfARequestThatWaitsIsTaken) {
  const UniqueFd socket = attach();
  ask(socket, AttachType::kJoin, abi::Join{}, 5);
  ask(socket, AttachType::kLeave, abi::Leave{1, 0}, 6);
  expect_refused_and_closed(socket, exchange(socket, AttachType::kLeave, abi::Leave{1, 0}, 5),
                            {"request id is 5", "no request that still waits"});
  EXPECT_EQ(host_.leaves.size(), 1u);
}

TEST_F(Attach, AJoinTooManyIsRefusedAndTheSessionGoesOn) {
  const UniqueFd socket = attach();
  const std::uint64_t id = welcome_.read<abi::Welcome>().value().session_id;
  std::uint32_t request = 1;
  for (std::size_t i = 0; i < abi::kMaxPendingRequests; ++i) {
    ask(socket, AttachType::kJoin, abi::Join{}, request++);
  }
  const Packet refused = exchange(socket, AttachType::kJoin, abi::Join{}, request);
  EXPECT_EQ(refused.header.request_id, request);
  EXPECT_NE(text_of(refused).find("RESOURCE_EXHAUSTED"), std::string::npos) << text_of(refused);
  EXPECT_NE(text_of(refused).find("has 64 requests without a reply"), std::string::npos) << text_of(refused);
  EXPECT_EQ(host_.joins.size(), abi::kMaxPendingRequests);
  ask(socket, AttachType::kLeave, abi::Leave{1, 0}, ++request);
  EXPECT_EQ(host_.leaves.size(), 1u) << "a leave is taken";
  table_->refuse(id, request, not_found("left"));
  table_->refuse(id, 1, not_found("joined"));
  Packet reply;
  ASSERT_EQ(receive(socket, reply), ReceiveResult::kPacket);
  ASSERT_EQ(receive(socket, reply), ReceiveResult::kPacket);
  ask(socket, AttachType::kJoin, abi::Join{}, ++request);
  EXPECT_EQ(host_.joins.size(), abi::kMaxPendingRequests + 1);
  EXPECT_TRUE(host_.closed.empty());
}

// 120 sessions of one user had 64 joins each wait, and made the node lost to its cluster.
TEST_F(Attach, WaitingRequestsOfAllSessionsOfAUserHaveOneBound) {
  constexpr std::size_t kSessions = 20;
  constexpr std::size_t kJoins = SessionTable::kPendingPerSession * kSessions;
  host_.quota = {kSessions, "test"};
  const UniqueFd first = attach();
  const std::uint64_t id = welcome_.read<abi::Welcome>().value().session_id;
  UniqueFd second = attach();
  std::uint32_t request = 1;
  while (host_.joins.size() < kJoins) {
    const bool to_first = request <= abi::kMaxPendingRequests / 2;
    ask(to_first ? first : second, AttachType::kJoin, abi::Join{}, request++);
  }
  EXPECT_EQ(text_of(exchange(first, AttachType::kJoin, abi::Join{}, request++)),
            "RESOURCE_EXHAUSTED: user " + std::to_string(::geteuid()) +
                " has 80 requests without a reply; allowed: 80 (4 for each session that it may have)");
  g_peer_uid = 100'000;
  const UniqueFd stranger = attach();
  ask(stranger, AttachType::kJoin, abi::Join{}, request++);
  g_peer_uid = -1;
  while (host_.leaves.size() < kJoins) ask(first, AttachType::kLeave, abi::Leave{1, 0}, request++);
  EXPECT_NE(text_of(exchange(first, AttachType::kLeave, abi::Leave{1, 0}, request++))
                .find("allowed: 160 (8 for each session"),
            std::string::npos);
  // A request that has been answered, or whose session has ended, counts no more.
  second.reset();
  ASSERT_TRUE(pump_until([&] { return !host_.closed.empty(); }));
  for (const auto& [session, leave] : host_.leaves) table_->refuse(id, leave, not_found("left"));
  const auto take_reply = [&] {
    Packet reply;
    return receive(first, reply) == ReceiveResult::kPacket;
  };
  for (std::size_t i = 0; i < kJoins; ++i) ASSERT_TRUE(take_reply());
  ask(first, AttachType::kJoin, abi::Join{}, request);
  EXPECT_EQ(host_.joins.size(), kJoins + 2);
}

TEST_F(Attach, ATurnTakesFewPacketsOfAUserHoweverManySessionsItHas) {
  constexpr int kSessions = 32;
  constexpr std::uint32_t kPackets = 10;
  std::vector<UniqueFd> sockets;
  for (int i = 0; i < kSessions; ++i) sockets.push_back(attach());
  for (const UniqueFd& socket : sockets) {
    for (std::uint32_t i = 1; i <= kPackets; ++i)
      ASSERT_TRUE(send_message(socket.get(), AttachType::kLeave, abi::Leave{1, 0}, {}, i).ok());
  }
  const auto all_carried = [&] {
    return std::all_of(sockets.begin(), sockets.end(), [](const UniqueFd& socket) {
      int bytes = 0;
      return ::ioctl(socket.get(), SIOCOUTQ, &bytes) == 0 && bytes == 0;
    });
  };
  for (int i = 0; i < 10'000 && !all_carried(); ++i) ::usleep(1'000);
  ASSERT_TRUE(all_carried());
  std::size_t before = 0;
  while (host_.leaves.size() < kSessions * kPackets) {
    ASSERT_TRUE(pump_until([&] { return host_.leaves.size() > before; }));
    EXPECT_LE(host_.leaves.size() - before, static_cast<std::size_t>(SessionTable::kPacketsPerUser));
    before = host_.leaves.size();
  }
}

TEST_F(Attach, ADeadClientIsReportedOnce) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path_.c_str());
    if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) ::_exit(1);
    if (!send_message(socket.get(), AttachType::kHello, good_hello()).ok()) ::_exit(1);
    [[maybe_unused]] const ssize_t n = ::write(ready[1], "x", 1);
    ::pause();
    ::_exit(0);
  }
  char byte;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  ASSERT_TRUE(pump_until([&] { return host_.opened.size() == 1; }));
  EXPECT_EQ(table_->find(host_.opened[0])->peer.pid, child);
  send_signal(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(pump_until([&] { return !host_.closed.empty(); }));
  EXPECT_EQ(host_.closed, host_.opened);
  EXPECT_EQ(host_.closed_how, "died");
  EXPECT_EQ(table_->attached(), 0u);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(Attach, EndSaysGoodbyeAndWakesTheClient) {
  const UniqueFd socket = attach();
  const std::uint64_t id = welcome_.read<abi::Welcome>().value().session_id;
  const Mapping b = Mapping::map(welcome_.fds[1].get(), sizeof(abi::SegmentB), Access::kReadOnly).value();
  table_->end(id, Status(StatusCode::kAborted, "maintenance"));
  Packet packet;
  ASSERT_EQ(receive(socket, packet), ReceiveResult::kPacket);
  ASSERT_EQ(packet.header.type, static_cast<std::uint16_t>(AttachType::kGoodbye));
  EXPECT_STREQ(packet.read<abi::Goodbye>().value().text, "maintenance");
  EXPECT_EQ(b.as<abi::SegmentB>()->end_status.load(), static_cast<std::uint32_t>(StatusCode::kAborted));
  EXPECT_TRUE(pump_until([&] { return readable(welcome_.fds[3]); }));
  char byte;
  EXPECT_EQ(::recv(welcome_.fds[3].get(), &byte, 1, MSG_DONTWAIT), 1) << "the doorbell rang";
  EXPECT_EQ(host_.closed.size(), 1u);
}

}  // namespace
}  // namespace epd::session
