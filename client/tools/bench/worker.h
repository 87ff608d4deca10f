// One rank of a run, in its own process, and the run of all ranks.
#pragma once

#include "kernels/routing.h"
#include "kit/ceiling.h"
#include "kit/compare.h"
#include "kit/daemon.h"
#include "kit/nodes.h"
#include "kit/random.h"
#include "kit/routing.h"
#include "kit/session.h"
#include "kit/team.h"
#include "layer.h"
#include "plan.h"
#include "proto/arena.h"
#include "rank_device.h"
#include "samples.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace epd::bench {

// Seeds of the data that ranks send and answer in a run. Any rank can compute the data of another one for the
// oracle.
inline std::uint64_t x_seed(const RunPlan& plan, std::uint32_t rank) {
  return kit::derive(plan.seed, 0x10000 + rank);
}

inline std::uint64_t y_seed(const RunPlan& plan, std::uint32_t rank) {
  return kit::derive(plan.seed, 0x20000 + rank);
}

inline std::uint64_t bias_seed(const RunPlan& plan, std::uint32_t rank, std::uint32_t which) {
  return kit::derive(plan.seed, 0x30000 + 2 * rank + which);
}

// `count` elements of random bytes that are finite as bf16, e4m3, scales or float32.
template <typename T>
std::vector<T> any_data(std::uint64_t seed, std::size_t count) {
  std::vector<T> data(abi::align_up(count * sizeof(T), 8) / sizeof(T));
  kit::fill_bf16(seed, reinterpret_cast<std::uint16_t*>(data.data()), data.size() * sizeof(T) / 2);
  data.resize(count);
  return data;
}

// Data that all ranks get from the coordinator; outlives them.
struct RunContext {
  RunPlan plan;
  std::vector<std::string> sockets;  // of each node
  std::string group;                 // name
  kit::RoutingSource routing;
  kit::CopyCeiling* ceiling = nullptr;  // null: not measured
  Samples* samples = nullptr;
  const BarrierWords* start_barrier = nullptr;
  const kit::OwnNodes* nodes = nullptr;  // the nodes whose links are measured; or null
  // Called on rank 0 after each group of so many measured iterations, while the others wait.
  std::uint32_t iterations_of_pair = 0;
  std::function<void(std::uint32_t pair)> after_pair{};
};

class Worker {
 public:
  Worker(const RunContext& context, kit::TeamRank& self);
  // Runs all iterations. Throws ToolError if an operation ends with anything but OK.
  void run();

 private:
  struct Slot {
    epd_buffers_t buffers{};
    epd_handle_t handle = 0;
    epd_ticket_t dispatch = 0;  // of the last layer of a graph that computes too
    std::size_t rows_of_y = 0;  // that have been filled
  };
  struct Choices {
    std::vector<std::int32_t> idx;
    std::vector<float> weights;
  };
  // An operation to time.
  struct Attempt {
    std::string what;
    std::uint32_t slot;
    std::function<epd_ticket_t()> submit;
    bool has_counts = false;
    bool ahead = false;  // on GPUs: submitted before the start barrier opens
  };
  struct Timing {
    double time_us = 0;  // on GPUs the time in the stream, else host_us
    double host_us = 0, call_us = 0, counts_us = 0;
    epd_result_t result{};
  };

  void make_device();
  void make_layer();
  void connect();
  void fill_slots();
  void run_noops(std::size_t first, std::uint32_t count);
  void run_stream_noops(std::size_t first, std::uint32_t count);
  void iterate(std::uint32_t iteration);
  void iterate_layers(std::uint32_t iteration);
  double timed_layers(const std::string& what, bool computes, bool moves);
  void prepare(std::uint32_t iteration, std::uint32_t slot_index);
  kit::FillMemory filler() const;
  void poison(const Slot& slot);
  void poison_combine(const Slot& slot);
  epd_dispatch_args_t dispatch_args(std::uint32_t slot_index) const;
  epd_combine_args_t combine_args(std::uint32_t slot_index) const;
  Timing timed(const Attempt& attempt);
  Timing timed_by_host(const Attempt& attempt);
  void take_counts(const Attempt& attempt, epd_ticket_t ticket, double begin, Timing& timing);
  Timing timed_in_stream(const Attempt& attempt);
  Attempt behind_gate(const Attempt& attempt);
  double time_of_no_work_us(bool ahead);
  // Makes the call, or replays the graph that captured it.
  std::function<epd_ticket_t()> replayable(const Attempt& attempt);
  void* stream() const;
  bool in_stream() const { return gpu_ != nullptr && plan_.in_stream; }
  // Waits for the ticket's operation; ticket 0: for the work in the stream.
  epd_result_t finish(epd_ticket_t ticket, const std::string& what);
  // Runs `body` and notes the bytes that the nodes' links carried meanwhile.
  Timing with_link_bytes(OperationSamples& samples, std::uint32_t measured,
                         const std::function<Timing()>& body);
  std::uint64_t link_bytes();
  void note_far_bytes(std::size_t at, const Choices& choices);
  void end_pair(std::uint32_t iteration);
  Timing timed_dispatch(std::uint32_t slot_index, bool ahead);
  Timing timed_combine(std::uint32_t slot_index, bool ahead);
  Timing timed_noop(bool ahead);
  // An operation to time beside a GEMM.
  struct Overlapped {
    std::string what;
    std::uint32_t slot;
    std::function<epd_ticket_t(bool deferred)> submit;
    std::function<void()> poison;  // before the last time
  };
  void overlap(std::uint32_t iteration, std::size_t at, bool check);
  // Times the GEMM alone, GEMM and operation one after the other, and both together. Returns the last timing.
  Timing measure_overlap(OperationSamples& samples, std::size_t at, const Overlapped& overlapped);
  Timing timed_beside(const Overlapped& overlapped, bool gemm_too);
  void record(OperationSamples& samples, std::size_t at, const Timing& timing) const;
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
  void add_verdict(const OperationSamples& samples, const std::string& what, const std::string& difference);
  Choices choices_of(std::uint32_t rank, std::uint32_t iteration) const;
  template <typename T>
  void put(void* region, const std::vector<T>& data) const;

  const RunContext& context_;
  const RunPlan& plan_;
  kit::TeamRank& self_;
  std::unique_ptr<RankDevice> device_;  // its context outlives the session
  GpuRank* gpu_ = nullptr;              // the same; null on host devices
  kit::SessionPtr session_;
  kit::GroupPtr group_;  // leaves before session_ detaches
  const kernels::reference::GroupParams params_;
  std::unique_ptr<Gemm> gemm_;
  std::unique_ptr<Layer> layer_;
  std::unique_ptr<StartBarrier> start_barrier_;
  struct Graph {
    void* graph = nullptr;
    epd_ticket_t ticket = 0;  // its operation's; 0: none
  };
  std::map<std::pair<std::string, std::uint32_t>, Graph> graphs_;  // of `what` on a slot
  std::vector<Slot> slots_;
  kernels::RoutingPlan route_;
  std::vector<std::uint32_t> bases_;
};

// Runs fresh rank processes and returns their measurements. Throws kit::ToolError if the run did not finish.
// This process must have one thread. `label` is for the progress line, shown on a terminal only.
std::unique_ptr<Samples> run_ranks(const RunPlan& plan, const kit::OwnDaemon& daemon,
                                   const std::string& label);

}  // namespace epd::bench
