// One rank's forward passes, in its own process.
#pragma once

#include "kernels/reference.h"
#include "kernels/routing.h"
#include "kit/ceiling.h"
#include "kit/nodes.h"
#include "kit/session.h"
#include "kit/team.h"
#include "plan.h"

#include <string>
#include <vector>

namespace epd::demo {

// Data that all ranks get from the parent; outlives them.
struct DemoContext {
  DemoPlan plan;
  std::vector<std::string> sockets;  // of each node
  std::string group;
  std::vector<std::string> pieces;       // of the text
  std::vector<Gate> gates;               // per layer
  const kit::OwnNodes* nodes = nullptr;  // null: the daemon was started by somebody else
  kit::CopyCeiling* ceiling = nullptr;
  DemoRecords* records = nullptr;
};

class DemoRank {
 public:
  DemoRank(const DemoContext& context, kit::TeamRank& self);
  // All passes: the first measures each operation alone, the others overlap communication with computation.
  // Every result of every layer is compared with kernels/reference between the timed parts.
  void run();

 private:
  // A micro-batch's buffers in one layer, and its operation in flight.
  struct Slot {
    epd_buffers_t buffers{};
    epd_handle_t handle = 0;
    epd_ticket_t ticket = 0;
    std::uint32_t num_recv_rows = 0;
  };

  void connect();
  void note_link_bytes(std::uint32_t pass);
  void load_text(std::uint32_t pass);
  void poison_slots();
  double overlapped_layers(std::uint32_t begin, std::uint32_t end);  // returns its time in us
  void lone_layers(std::uint32_t begin, std::uint32_t end);
  void choose_experts(std::uint32_t layer, std::uint32_t m);
  void run_experts(std::uint32_t layer, std::uint32_t m);
  void add_output(std::uint32_t layer, std::uint32_t m);
  epd_result_t wait(std::uint32_t layer, std::uint32_t m, const char* what);
  void exchange_counts(std::uint32_t layer, std::uint32_t m);
  void probe_dispatch(std::uint32_t layer, std::uint32_t m);
  void probe_combine(std::uint32_t layer, std::uint32_t m);
  void check(std::uint32_t layer, std::uint32_t m);
  void publish(const Slot& slot, std::uint32_t m);
  void add_verdict(std::uint32_t layer, const std::string& what, const std::string& difference);
  void note_results(std::uint32_t pass, std::uint32_t begin, std::uint32_t end);
  std::uint64_t checksum() const;

  Slot& slot(std::uint32_t layer, std::uint32_t m) { return slots_[slot_index(layer, m)]; }
  std::uint32_t slot_index(std::uint32_t layer, std::uint32_t m) const {
    return layer % plan_.segment() * kMicroBatches + m;
  }
  LayerRecord& record(std::uint32_t layer) {
    return context_.records->layers[std::size_t{layer} * self_.size() + self_.rank()];
  }

  const DemoContext& context_;
  DemoPlan plan_;  // with the group's sum_ranks, once it has joined
  kit::TeamRank& self_;
  kit::SessionPtr session_;
  kit::GroupPtr group_;  // leaves before session_ detaches
  std::vector<Experts> experts_;
  std::vector<Slot> slots_;
  std::vector<float> states_[kMicroBatches];  // [n,H] the residual stream
  std::vector<float> normed_;                 // [n,H] scratch
  bool measuring_ = false;                    // this pass counts for the overlap figures
  kernels::RoutingPlan route_;
  std::vector<std::uint32_t> bases_;
};

}  // namespace epd::demo
