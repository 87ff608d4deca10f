// The calls of a host device's lane (proto/call_words.h). The engine's loop takes them from the ring of the
// client's host, carries each out as a HostOperation, and tells the client how it has ended. Operations of a
// lane run in order, one at a time.
#pragma once

#include "base/clock.h"
#include "device/launcher.h"
#include "host_operation.h"
#include "kernels/calls.h"

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

namespace epd::device {

class HostCalls final : public CallPort, private OperationPeers {
 public:
  struct Needs {
    HostSms& sms;
    HostPlans& plans;
    const std::int32_t& priority;  // of the lane
    const Clock& clock;
  };
  HostCalls(const LaneShape& shape, const Needs& needs);

  void open(const Layout& layout) override;
  void set_limits(const Limits& limits) override;
  void halt() override;
  bool halted() override { return !takes() && !running_; }
  void stop() override { state_.enabled_epoch_taken = 0; }
  bool stopped() override { return !takes(); }
  void resume(const Start& start) override;
  bool resumed() override { return takes(); }
  const kernels::JournalEntry* front() const override {
    return journal_.empty() ? nullptr : &journal_.front().entry;
  }
  void pop() override { journal_.pop_front(); }
  void look() override { looked_ = true; }
  const Ring* seen() override;
  const OperationInFlight* running() const override { return running_ ? &*running_ : nullptr; }
  std::string waited_for() const override { return journal_.front().waited_for; }
  std::uint64_t deadline_ns() const override;

  // Does one short piece of work. False: it waits, or there is no call.
  bool advance();
  bool can_advance() const;
  bool can_move() const { return running_ && running_->can_move(); }

 private:
  struct Ended {
    kernels::JournalEntry entry;
    std::string waited_for;
  };

  // OperationPeers
  kernels::Peer peer(std::uint32_t rank) const override;
  std::span<const std::uint8_t> masked() const override { return layout_.group->masked(); }
  RoutedRows routed_rows(std::uint32_t rank, std::uint64_t routing) const override;
  bool holds_rows(std::uint32_t rank, std::uint64_t routing) const override {
    return layout_.group->holds_rows(rank, routing);
  }
  void ring() const override { layout_.group->ring_peers(); }

  bool takes() const { return state_.enabled_epoch_taken != 0; }
  abi::CallWords& words() const { return *reinterpret_cast<abi::CallWords*>(layout_.words); }
  abi::Results& results() const { return *reinterpret_cast<abi::Results*>(layout_.results->bytes()); }
  // The words at the place of the next call.
  abi::PackedCall next() const;
  bool take();
  void begin(const abi::PackedCall& packed, const abi::Call& call);
  void end_unrun(const abi::PackedCall& packed, const abi::Call& call, const kernels::Judgement& judgement);
  bool tell_news();
  void tell_counts();
  void expire();
  void conclude(kernels::OpResult result);
  std::uint32_t count_lost() const;
  void publish_end(const abi::Call& call, abi::CallEnding ending, const kernels::OpResult& result,
                   std::uint32_t writing, std::uint64_t index);
  void note(const abi::PackedCall& packed, const kernels::OpResult& result, std::uint64_t index);

  const LaneShape shape_;
  const Needs needs_;
  Layout layout_;
  kernels::CallState state_{};  // words of kernels alone are not used
  std::vector<kernels::RouteState> routes_;
  kernels::GroupView view_;
  std::vector<kernels::PeerView> peers_;
  std::deque<Ended> journal_;
  bool looked_ = false;
  Ring ring_{};

  // These describe the call that runs.
  std::optional<HostOperation> running_;
  abi::PackedCall packed_{};
  kernels::TakenCall call_{};
  std::uint64_t begun_ns_ = 0;
  std::uint64_t deadline_ns_ = 0;
  bool counted_ = false;  // and published
  bool sent_ = false;     // likewise
  bool expired_ = false;
  std::string waited_for_;
};

}  // namespace epd::device
