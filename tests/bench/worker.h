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
    std::size_t rows_of_y = 0;  // that have been filled
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
  void poison(const Slot& slot);
  epd_dispatch_args_t dispatch_args(std::uint32_t slot_index) const;
  double timed_dispatch(Slot& slot, std::uint32_t slot_index, epd_result_t& result);
  double timed_combine(Slot& slot, std::uint32_t slot_index);
  void record(OperationSamples& samples, std::size_t at, double time_us) const;
  void measure_ceiling(OperationSamples& samples, std::uint32_t measured, bool of_dispatch);
  void check_dispatch(std::uint32_t iteration, const Slot& slot, std::uint32_t num_recv_rows);
  void check_combine(std::uint32_t iteration, const Slot& slot);
  kernels::reference::RankInput input_of(std::uint32_t rank, std::uint32_t iteration, bool with_rows) const;
  kernels::reference::CombineInput answer_of(std::uint32_t rank) const;
  // Rows of the rank's recv_x that tokens of this iteration fill, and the end of all that combine may read.
  std::vector<kernels::RowRange> filled_rows(std::uint32_t rank) const;
  std::size_t end_of_rows(std::uint32_t rank) const;
  void fill_y(Slot& slot) const;
  kit::TargetCounts counts() const;
  void add_verdict(const std::string& what, const std::string& difference);
  Choices choices_of(std::uint32_t rank, std::uint32_t iteration) const;
  void flush_cache();

  const RunContext& context_;
  const RunPlan& plan_;
  kit::TeamRank& self_;
  kit::SessionPtr session_;
  kit::GroupPtr group_;  // leaves before session_ detaches
  const kernels::reference::GroupParams params_;
  std::vector<Slot> slots_;
  kernels::RoutingPlan route_;
  std::vector<std::uint32_t> bases_;
  std::vector<char> evict_;
};

}  // namespace epd::bench
