#include "engine_harness.h"

#include "device/memory.h"
#include "engine/engine_main.h"

#include <poll.h>
#include <sys/socket.h>
#include <chrono>
#include <stdexcept>

namespace epd::test {
namespace {

template <typename T>
T value_of(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.status().to_string());
  return std::move(result).value();
}

}  // namespace

EngineThread::EngineThread(std::uint32_t device_index, std::string kind)
    : device_index_(device_index),
      kind_(std::move(kind)),
      page_(value_of(make_sealed_memfd("test-page", sizeof(abi::EnginePage)))),
      bell_(value_of(make_eventfd())) {}

EngineThread::~EngineThread() {
  if (thread_.joinable()) stop();
}

void EngineThread::start() {
  auto [ours, theirs] = value_of(make_socketpair());
  link_ = std::move(ours);
  engine::EngineOptions options;
  options.device = kind_ + ":" + std::to_string(device_index_);
  options.link_fd = theirs.release();
  options.page_fd = value_of(duplicate(page_.get())).release();
  options.bell_fd = value_of(duplicate(bell_.get())).release();
  options.network = network_;
  thread_ = std::thread([this, options] {
    exit_code_ = open_ == nullptr ? engine::engine_main(options) : engine::engine_main(options, open_);
  });
  const std::optional<Packet> ready = expect(abi::LinkType::kReady);
  if (!ready) throw std::runtime_error("engine did not start");
  const auto body = value_of(ready->read<abi::EngineReady>());
  const auto* const address = reinterpret_cast<const std::byte*>(body.address);
  address_.assign(address, address + body.address_bytes);
}

void EngineThread::set_network(const transport::NetworkOptions& network, engine::OpenTransport open) {
  network_ = network;
  open_ = std::move(open);
}

int EngineThread::stop() {
  send(abi::LinkType::kStop, std::uint32_t{0});
  thread_.join();
  return exit_code_;
}

std::optional<Packet> EngineThread::expect(abi::LinkType type, int timeout_ms) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  while (std::chrono::steady_clock::now() < end) {
    pollfd waiting{link_.get(), POLLIN, 0};
    ::poll(&waiting, 1, 50);
    Packet packet;
    Status error;
    const ReceiveResult result = receive_packet(link_.get(), packet, error);
    if (result == ReceiveResult::kClosed) return std::nullopt;
    if (result == ReceiveResult::kPacket && packet.header.type == static_cast<std::uint16_t>(type))
      return packet;
  }
  return std::nullopt;
}

RawSession::RawSession(std::uint64_t id)
    : id_(id),
      a_fd_(value_of(make_sealed_memfd("test-a", sizeof(abi::SegmentA)))),
      b_fd_(value_of(make_sealed_memfd("test-b", sizeof(abi::SegmentB)))),
      a_(value_of(Mapping::map(a_fd_.get(), sizeof(abi::SegmentA), Access::kReadWrite))),
      b_(value_of(Mapping::map(b_fd_.get(), sizeof(abi::SegmentB), Access::kReadWrite))) {
  ring_client_ = value_of(make_eventfd());
}

void RawSession::add_to(EngineThread& engine) {
  engine_bell_ = value_of(duplicate(engine.bell().get()));
  engine.send(abi::LinkType::kAddSession, abi::AddSession{id_, 0, 0},
              {a_fd_.get(), b_fd_.get(), ring_client_.get()});
}

void RawSession::ring() const {
  ring_eventfd(engine_bell_.get());
}

bool RawSession::rung() const {
  pollfd entry{ring_client_.get(), POLLIN, 0};
  std::uint64_t rings;
  return ::poll(&entry, 1, 10'000) == 1 && ::read(ring_client_.get(), &rings, sizeof(rings)) > 0;
}

std::uint32_t Ringer::ring(abi::Call call, std::uint32_t num_tokens, std::uint64_t epoch, bool flagged) {
  call.number = by_host_ ? host_tail_++ : words_->tail++;
  call.num_tokens = num_tokens;
  call.epoch = static_cast<std::uint32_t>(epoch & 0xff);
  call.flagged = flagged;
  call.result = result_of(call.number);
  if (flagged) words_->flags[abi::flag_of(call.op, call.slot)] = 0;
  store_call(by_host_ ? words_->host_calls : words_->calls, call);
  std::atomic_ref(words_->bell[by_host_ ? 1 : 0]).store(1);
  if (session_ != nullptr) session_->ring();
  return call.number;
}

abi::CallEnd Ringer::end(std::uint32_t number) {
  const abi::CallResult& place = results_->places[abi::place_of(result_of(number))];
  abi::CallEnd end;
  const bool told = comes([&] {
    std::uint64_t words[abi::CallResult::kWords];
    for (std::uint32_t i = 0; i < abi::CallResult::kWords; ++i)
      words[i] = std::atomic_ref(const_cast<std::uint64_t&>(place.words[i])).load();
    return abi::read_result(words, end) && end.result == result_of(number);
  });
  if (!told) throw std::runtime_error("call " + std::to_string(number) + " has no result");
  return end;
}

RawGroup::RawGroup(std::uint64_t id, const abi::GroupShape& shape, const std::string& kind,
                   std::uint32_t num_devices)
    : id_(id),
      shape_(shape),
      kind_(kind),
      num_devices_(num_devices),
      since_(shape.num_ranks, 1),
      user_fd_(shape.num_ranks),
      exchange_fd_(shape.num_ranks),
      board_fd_(shape.num_ranks),
      results_fd_(shape.num_ranks),
      user_(shape.num_ranks),
      board_(shape.num_ranks),
      results_(shape.num_ranks) {
  for (std::uint32_t rank = 0; rank < shape.num_ranks; ++rank) make(rank);
}

void RawGroup::make(std::uint32_t rank) {
  const device::DeviceName device =
      value_of(device::parse_device_name(kind_ + ":" + std::to_string(rank % num_devices_)));
  const auto memory = [&](const char* label, std::uint64_t bytes) {
    return value_of(device::make_arena_memory(device, label, bytes));
  };
  const std::uint64_t user = abi::UserArenaLayout(shape_).total_bytes;
  const std::uint64_t board = abi::WaitsLayout(shape_).total_bytes;
  user_fd_[rank] = memory("test-user", user);
  exchange_fd_[rank] = memory("test-exchange", abi::ExchangeArenaLayout(shape_).total_bytes);
  board_fd_[rank] = value_of(make_sealed_memfd("test-board", board));
  user_[rank] = value_of(Mapping::map(user_fd_[rank].get(), user, Access::kReadWrite));
  board_[rank] = value_of(Mapping::map(board_fd_[rank].get(), board, Access::kReadWrite));
  const std::uint64_t results = abi::ResultsLayout(shape_).total_bytes;
  results_fd_[rank] = value_of(device::make_results_memory(device, results));
  results_[rank] = value_of(Mapping::map(results_fd_[rank].get(), results, Access::kReadWrite));
}

void RawGroup::replace(std::uint32_t rank, std::uint64_t since) {
  since_[rank] = since;
  make(rank);
}

void RawGroup::mask_rank(EngineThread& engine, std::uint32_t rank) const {
  engine.send(abi::LinkType::kGroupRank, abi::GroupRank{id_, rank, 0, 0});
}

void RawGroup::close_streams(EngineThread& engine, std::uint32_t rank) const {
  const abi::UserArenaLayout layout(shape_);
  engine.send(abi::LinkType::kCloseStreams, abi::CloseStreams{layout.total_bytes, layout.calls},
              {user_fd_[rank].get()});
}

Mapping RawGroup::map_exchange(std::uint32_t rank) const {
  return value_of(Mapping::map(exchange_fd_[rank].get(), abi::ExchangeArenaLayout(shape_).total_bytes,
                               Access::kReadWrite));
}

void RawGroup::tell_rank(const std::vector<EngineThread*>& engines, const std::vector<RawSession*>& sessions,
                         std::uint32_t engine, std::uint32_t rank) const {
  EngineThread& target = *engines[engine];
  const auto device = static_cast<std::uint32_t>(rank % engines.size());
  target.send(abi::LinkType::kGroupRank, abi::GroupRank{id_, rank, device, since_[rank]},
              {user_fd_[rank].get(), exchange_fd_[rank].get(), engines[device]->bell().get(),
               engines[device]->page().get()});
  if (device != engine) return;
  target.send(
      abi::LinkType::kGroupMember,
      abi::GroupMember{id_, sessions[rank]->id(), rank, member(rank), since_[rank] > 1 ? resume_index : 0},
      {board_fd_[rank].get(), results_fd_[rank].get()});
}

void RawGroup::begin(const std::vector<EngineThread*>& engines, const std::vector<RawSession*>& sessions,
                     std::uint32_t engine, bool broken) const {
  EngineThread& target = *engines[engine];
  abi::GroupBegin message{};
  message.group_id = id_;
  message.epoch = epoch;
  message.resume_index = resume_index;
  message.priority = priority;
  message.broken = broken ? 1 : 0;
  message.shape = shape_;
  target.send(abi::LinkType::kGroupBegin, message);
  for (std::uint32_t rank = 0; rank < shape_.num_ranks; ++rank) tell_rank(engines, sessions, engine, rank);
}

void RawGroup::commit(EngineThread& engine) const {
  engine.send(abi::LinkType::kGroupCommit, abi::GroupRef{id_});
}

void RawGroup::announce(const std::vector<EngineThread*>& engines, const std::vector<RawSession*>& sessions,
                        std::uint32_t engine, bool broken) const {
  begin(engines, sessions, engine, broken);
  commit(*engines[engine]);
}

void RawGroup::add_to_engine(const std::vector<EngineThread*>& engines,
                             const std::vector<RawSession*>& sessions, std::uint32_t engine,
                             bool broken) const {
  announce(engines, sessions, engine, broken);
  const auto ready = engines[engine]->expect(abi::LinkType::kGroupReady);
  if (!ready || ready->read<abi::GroupReady>().value().status != StatusCode::kOk) {
    throw std::runtime_error("group did not get ready");
  }
}

void RawGroup::add_to(const std::vector<EngineThread*>& engines,
                      const std::vector<RawSession*>& sessions) const {
  for (std::uint32_t i = 0; i < engines.size(); ++i) add_to_engine(engines, sessions, i, false);
}

}  // namespace epd::test
