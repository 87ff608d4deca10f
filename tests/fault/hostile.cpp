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
  const abi::Joined joined = answer_.read<abi::Joined>().value();
  map_rank(joined);
  return joined;
}

// The shape is that of good_join(), but for the number of ranks, on which the layouts before the calls do not
// depend.
void HostileSession::map_rank(const abi::Joined& joined) {
  RANK_CHECK(answer_.fds.size() == 3, "Joined without descriptors");
  ranks_[joined.member] = {map(answer_.fds[0], joined.user_bytes, Access::kReadWrite),
                           map(answer_.fds[2], sizeof(abi::Results), Access::kReadOnly)};
}

abi::Call HostileSession::noop(const abi::Joined& joined) {
  Rank& its = rank(joined);
  abi::Call call;
  call.number = its.made++;
  call.op = abi::Op::kNoop;
  call.epoch = static_cast<std::uint32_t>(joined.epoch) & 0xff;
  call.result = abi::result_of(call.number % abi::kOnceResults, call.number / abi::kOnceResults);
  return call;
}

abi::Call HostileSession::dispatch(const abi::Joined& joined, std::uint32_t num_tokens) {
  abi::Call call = noop(joined);
  call.op = abi::Op::kDispatch;
  call.num_tokens = num_tokens;
  return call;
}

abi::CallWords& HostileSession::words(const abi::Joined& joined) {
  const abi::UserArenaLayout layout(good_join("").shape);
  return *reinterpret_cast<abi::CallWords*>(rank(joined).arena.bytes() + layout.calls);
}

void HostileSession::push(const abi::Joined& joined, const abi::Call& call) {
  write_call(words(joined), call);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (b().engine_sleep.sleeping.load(std::memory_order_relaxed) != 0) ring();
}

void HostileSession::ring() const {
  ring_socket(bell_.get());
}

std::uint32_t HostileSession::ended(const abi::Joined& joined) {
  return std::atomic_ref(rank(joined).results.as<abi::Results>()->host_ended).load(std::memory_order_acquire);
}

std::optional<abi::CallEnd> HostileSession::take(const abi::Joined& joined, double seconds) {
  Rank& its = rank(joined);
  const std::uint32_t result = abi::result_of(its.taken % abi::kOnceResults, its.taken / abi::kOnceResults);
  abi::CallEnd end;
  if (!eventually(seconds, [&] { return read_end(its.results, result, end); })) return std::nullopt;
  ++its.taken;
  return end;
}

std::string HostileSession::ended(double seconds) const {
  const auto over = static_cast<std::uint32_t>(abi::SessionState::kEnded);
  if (!eventually(seconds, [&] { return b().state.load(std::memory_order_acquire) == over; })) return "";
  const auto status = static_cast<StatusCode>(b().end_status.load());
  return std::string(status_name(status)) + ": " + std::string(b().message, abi::text_length(b().message));
}

}  // namespace epd::test
