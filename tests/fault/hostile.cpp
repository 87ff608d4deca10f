#include "hostile.h"

#include "support/ranks.h"

#include <sys/socket.h>
#include <atomic>
#include <cstring>

namespace epd::test {
namespace {

constexpr double kAnswerS = 20;

Mapping map(const UniqueFd& fd, std::uint64_t bytes, Access access) {
  Result<Mapping> mapping = Mapping::map(fd.get(), bytes, access);
  if (!mapping.ok()) RANK_FAIL(mapping.status().to_string());
  return std::move(*mapping);
}

}  // namespace

HostileSession::HostileSession(const std::string& socket, const std::string& device) : client_(socket) {
  RANK_CHECK(client_.valid(), "no connection to " + socket);
  abi::Hello hello = RawClient::good_hello();
  abi::set_text(hello.device, device.data(), device.size());
  const std::string answer = ask(abi::AttachType::kHello, hello);
  RANK_CHECK(answer == "OK", "attach: " + answer);
  welcome_ = answer_.read<abi::Welcome>().value();
  RANK_CHECK(answer_.fds.size() == 4, "Welcome without descriptors");
  a_ = map(answer_.fds[0], sizeof(abi::SegmentA), Access::kReadWrite);
  b_ = map(answer_.fds[1], sizeof(abi::SegmentB), Access::kReadOnly);
  bell_ = std::move(answer_.fds[2]);
  client_bell_ = std::move(answer_.fds[3]);
  answer_.fds.resize(2);
  segments_ = std::move(answer_.fds);
}

std::string HostileSession::ask(abi::AttachType type, const void* body, std::size_t bytes) {
  RANK_CHECK(client_.send(type, body, bytes), "the daemon takes no request");
  return next_answer();
}

std::string HostileSession::next_answer() {
  std::optional<Packet> answer = client_.receive(kAnswerS);
  if (!answer.has_value()) return "no answer";
  answer_ = std::move(*answer);
  if (answer_.header.type != static_cast<std::uint16_t>(abi::AttachType::kRefused)) return "OK";
  const abi::Refused refused = answer_.read<abi::Refused>().value();
  return std::string(status_name(refused.status)) + ": " +
         std::string(refused.text, abi::text_length(refused.text));
}

abi::Join HostileSession::good_join(const std::string& group) {
  abi::Join join{};
  abi::set_text(join.group, group.data(), group.size());
  join.shape.num_ranks = 1;
  join.shape.num_experts = 4;
  join.shape.max_tokens = 16;
  join.shape.hidden = 128;
  join.shape.topk = 2;
  join.shape.depth = 2;
  return join;
}

abi::Joined HostileSession::join(const std::string& group) {
  const std::string answer = ask(abi::AttachType::kJoin, good_join(group));
  RANK_CHECK(answer == "OK", "join: " + answer);
  return answer_.read<abi::Joined>().value();
}

abi::Submission HostileSession::noop(const abi::Joined& joined) {
  abi::Submission submission{};
  submission.ticket = next_ticket_++;
  submission.op = abi::Op::kNoop;
  submission.member = joined.member;
  submission.epoch = joined.epoch;
  return submission;
}

abi::Submission HostileSession::dispatch(const abi::Joined& joined, std::uint32_t num_tokens) {
  abi::Submission submission = noop(joined);
  submission.op = abi::Op::kDispatch;
  submission.num_tokens = num_tokens;
  return submission;
}

void HostileSession::push(const abi::Submission& submission) {
  abi::Submission& place = a().submissions.slots[tail_ % abi::kSubmissionSlots];
  std::memcpy(reinterpret_cast<char*>(&place) + sizeof(place.sequence),
              reinterpret_cast<const char*>(&submission) + sizeof(place.sequence),
              sizeof(place) - sizeof(place.sequence));
  std::atomic_ref(place.sequence).store(++tail_, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (b().engine_sleep.sleeping.load(std::memory_order_relaxed) != 0) ring();
}

void HostileSession::ring() const {
  ring_socket(bell_.get());
}

std::optional<abi::Completion> HostileSession::take(double seconds) {
  // Only looks: ring_peek writes nothing, but its type says it might.
  auto& ring = const_cast<abi::SegmentB&>(b()).completions;
  abi::Completion completion;
  if (!eventually(seconds, [&] { return abi::ring_peek(ring, head_, completion); })) return std::nullopt;
  a().completion_head.value.store(++head_, std::memory_order_release);
  return completion;
}

std::string HostileSession::ended(double seconds) const {
  const auto over = static_cast<std::uint32_t>(abi::SessionState::kEnded);
  if (!eventually(seconds, [&] { return b().state.load(std::memory_order_acquire) == over; })) return "";
  const auto status = static_cast<StatusCode>(b().end_status.load());
  return std::string(status_name(status)) + ": " + std::string(b().message, abi::text_length(b().message));
}

}  // namespace epd::test
