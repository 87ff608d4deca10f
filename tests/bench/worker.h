// One rank of a run, in its own process.
#pragma once

#include "kernels/routing.h"
#include "kit/ceiling.h"
#include "kit/routing.h"
#include "kit/session.h"
#include "kit/team.h"
#include "plan.h"
#include "samples.h"

#include <string>
#include <vector>

namespace epd::bench {

// What all ranks get from the coordinator; outlives them.
struct RunContext {
  RunPlan plan;
  std::string socket;
  std::string group;  // name
  kit::RoutingSource routing;
  kit::CopyCeiling* ceiling = nullptr;
  Samples* samples = nullptr;
};

class Worker {
 public:
  Worker(const RunContext& context, kit::TeamRank& self);
  // All iterations. Throws ToolError if an operation ends with anything but OK.
  void run();

 private:
  struct Slot {
    epd_buffers_t buffers = EPD_BUFFERS_INIT;
    epd_handle_t handle = 0;
  };
  struct Choices {
    std::vector<std::int32_t> idx;
    std::vector<float> weights;
  };

  void connect();
  void fill_slots();
  void run_noops(std::size_t first, std::uint32_t count);
  void iterate(std::uint32_t iteration);
  void prepare(std::uint32_t iteration);
  double timed_dispatch(Slot& slot, std::uint32_t slot_index, epd_result_t& result);
  double timed_combine(Slot& slot, std::uint32_t slot_index);
  void record(OperationSamples& samples, std::size_t at, double time_us) const;
  void measure_ceiling(OperationSamples& samples, std::uint32_t measured, bool of_dispatch);
  void check_dispatch(std::uint32_t iteration, const Slot& slot, std::uint32_t num_recv_rows);
  void check_combine(std::uint32_t iteration, const Slot& slot);
  void add_verdict(const std::string& what, const std::string& difference);
  Choices choices_of(std::uint32_t rank, std::uint32_t iteration) const;
  void flush_cache();

  const RunContext& context_;
  const RunPlan& plan_;
  kit::TeamRank& self_;
  kit::SessionPtr session_;
  kit::GroupPtr group_;  // leaves before session_ detaches
  std::vector<Slot> slots_;
  kernels::RoutingPlan route_;
  std::vector<std::uint32_t> bases_;
  std::vector<char> evict_;
};

}  // namespace epd::bench
