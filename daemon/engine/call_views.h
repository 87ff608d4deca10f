// Shows the calls of a rank in the engine's page: those that are enqueued and have not ended, as far as the
// engine knows.
#pragma once

#include "group.h"
#include "page.h"

#include <cstdint>
#include <span>
#include <vector>

namespace epd::engine {

class CallViews {
 public:
  struct Enqueued {
    kernels::CallRing ring = kernels::kByStreams;
    std::uint32_t number = 0;
    std::uint64_t index = 0;  // of the operation in its group; for a noop that of the next operation
    abi::Call call;
    std::uint32_t timeout_ms = 0;
  };

  explicit CallViews(const Member& member) : member_(member) {}
  ~CallViews() { clear(); }
  CallViews(const CallViews&) = delete;
  CallViews& operator=(const CallViews&) = delete;

  // In the order of execution: the first one runs, the others wait behind it. Their times begin when they are
  // first seen here.
  void show(std::span<const Enqueued> enqueued, Page& page, std::uint64_t now_ns);
  // How far the first one has come, and which rank it waits for (or OperationInFlight::kNobody).
  void show_first(abi::OpStage stage, std::uint32_t awaited, std::uint64_t now_ns);
  // `text` names the message or rank of another node that it waits for; "" if there is none.
  void show_far_wait(const std::string& text);
  // The call has failed, and waits for the group to agree on what that means. Nothing else is shown.
  void show_breaking(kernels::CallRing ring, std::uint32_t number, std::uint64_t now_ns);
  // Calls of the ring before this number have ended.
  void end_before(kernels::CallRing ring, std::uint32_t number);
  void clear();
  bool empty() const { return shown_.empty(); }

 private:
  struct Shown {
    kernels::CallRing ring = kernels::kByStreams;
    std::uint32_t number = 0;
    abi::OpView* view = nullptr;  // null: the page is full
    bool is_first = false;        // and its time counts
  };
  abi::OpView* claim(const Enqueued& enqueued, Page& page, std::uint64_t now_ns) const;

  const Member& member_;
  std::vector<Shown> shown_;
};

}  // namespace epd::engine
