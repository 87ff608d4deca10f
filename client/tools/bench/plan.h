#pragma once

#include "epd/epd.h"
#include "kernels/reference.h"
#include "kit/report.h"
#include "kit/routing.h"
#include "proto/shape.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::bench {

using kit::Json;
using kit::Reports;

enum class Operation { kDispatch, kCombine, kBoth, kNoop };
enum class CheckLevel { kAll, kSome, kOne, kNone };
enum class Backend { kHost, kCuda };
enum class LayerShape { kDecode, kPrefill };

using kit::Word;
using kit::word_of;
inline constexpr Word<Operation> kOperations[] = {{"dispatch", Operation::kDispatch},
                                                  {"combine", Operation::kCombine},
                                                  {"both", Operation::kBoth},
                                                  {"noop", Operation::kNoop}};
inline constexpr Word<CheckLevel> kCheckLevels[] = {{"all", CheckLevel::kAll},
                                                    {"some", CheckLevel::kSome},
                                                    {"one", CheckLevel::kOne},
                                                    {"none", CheckLevel::kNone}};
inline constexpr Word<Backend> kBackends[] = {{"host", Backend::kHost}, {"cuda", Backend::kCuda}};
inline constexpr Word<LayerShape> kLayerShapes[] = {{"decode", LayerShape::kDecode},
                                                    {"prefill", LayerShape::kPrefill}};
inline constexpr Word<epd_wait_by_t> kWaits[] = {
    {"memop", EPD_WAIT_BY_MEMOP}, {"kernel", EPD_WAIT_BY_KERNEL}, {"event", EPD_WAIT_BY_EVENT}};
inline constexpr Word<epd_layout_t> kLayouts[] = {
    {"compact", EPD_LAYOUT_COMPACT}, {"packed", EPD_LAYOUT_PACKED}, {"expert", EPD_LAYOUT_EXPERT}};
inline constexpr Word<epd_payload_t> kPayloads[] = {{"bf16", EPD_PAYLOAD_BF16},
                                                    {"fp8", EPD_PAYLOAD_FP8_CAST},
                                                    {"fp8-given", EPD_PAYLOAD_FP8},
                                                    {"opaque", EPD_PAYLOAD_OPAQUE}};
inline constexpr Word<epd_scale_format_t> kScales[] = {{"float32", EPD_SCALE_FORMAT_FLOAT32},
                                                       {"pow2", EPD_SCALE_FORMAT_FLOAT32_POW2},
                                                       {"ue8m0", EPD_SCALE_FORMAT_UE8M0}};
inline constexpr Word<epd_scale_layout_t> kScaleLayouts[] = {{"row_major", EPD_SCALE_LAYOUT_ROW_MAJOR},
                                                             {"column_major", EPD_SCALE_LAYOUT_COLUMN_MAJOR}};
inline constexpr std::uint32_t kDefaultGpuSms = 64;  // as devices.sms
inline constexpr std::uint32_t kMaxRanks = 64;
inline constexpr std::uint32_t kMaxIterations = 1'000'000;
inline constexpr std::uint32_t kMaxSms = 1024;  // devices.sms
inline constexpr std::uint32_t kMaxLayers = 256;
inline constexpr std::uint32_t kMaxContext = 1U << 20;

// The settings of one run.
struct RunPlan {
  Backend backend = Backend::kHost;
  std::uint32_t gpus = 0;  // backend cuda: the ranks take them in turn
  Operation operation = Operation::kBoth;
  std::uint32_t ranks = 4;
  std::uint32_t nodes = 1;     // over which they are spread in order; more than one: the group spans them
  std::uint32_t tokens = 128;  // of each rank, in each call
  std::uint32_t hidden = 7168;
  std::uint32_t experts = 256;
  std::uint32_t topk = 8;
  std::uint32_t depth = 2;
  std::uint32_t sms = 0;        // 0: the device's default
  std::uint32_t linger_us = 0;  // GPUs: devices.linger_us
  epd_layout_t layout = EPD_LAYOUT_COMPACT;
  epd_payload_t payload = EPD_PAYLOAD_BF16;
  epd_scale_format_t scales = EPD_SCALE_FORMAT_FLOAT32;
  epd_scale_layout_t scale_layout = EPD_SCALE_LAYOUT_ROW_MAJOR;
  std::uint32_t alignment = 1;
  std::uint32_t opaque_bytes = 0;
  std::uint32_t max_recv_rows = 0;
  std::uint32_t biases = 0;
  std::uint32_t sum_ranks = 0;  // 0: the daemon's choice
  std::int32_t priority = 0;
  bool cached = false;          // dispatch is measured under the handle of one just before it
  bool weighted = false;        // combine weighs rows by topk_weights
  bool return_weights = false;  // combine
  bool zero_padding = false;    // dispatch
  bool mark_unused = false;     // dispatch
  std::uint32_t iterations = 30;
  std::uint32_t warmup = 4;
  std::uint64_t seed = 1;
  CheckLevel check = CheckLevel::kSome;
  bool warm_cache = false;  // caches are not flushed before timed parts
  // Backend cuda: how streams wait.
  epd_wait_by_t wait_by = EPD_WAIT_BY_MEMOP;
  bool in_stream = true;  // false: operations are submitted without a stream, and the CPU waits
  bool graph = false;     // each operation is a graph that was captured once, replayed
  bool overlap = false;   // a GEMM beside each operation is measured too
  // epbench layer: graphs of so many layers; 0: operations alone.
  std::uint32_t layers = 0;
  LayerShape layer_shape = LayerShape::kDecode;
  std::uint32_t micro_batches = 1;  // of which each has `tokens`, and a slot
  std::uint32_t context = 8192;     // decode: tokens of each sequence
  std::string routing = "uniform";

  bool does_dispatch() const { return operation == Operation::kDispatch || operation == Operation::kBoth; }
  bool does_combine() const { return operation == Operation::kCombine || operation == Operation::kBoth; }
  std::uint32_t max_tokens() const { return tokens != 0 ? tokens : 1; }
  bool on_gpus() const { return backend == Backend::kCuda; }
  // "host:2", of its node
  std::string device_of(std::uint32_t rank) const;
  // The group's configuration, without its name, rank and time limit.
  epd_group_config_t config() const;
  abi::GroupShape shape() const;
  kernels::reference::GroupParams params() const;
  kit::RoutingSpec routing_spec() const;
  // How streams really wait: "memop", "kernel", "memop graph", "kernel graph"; or "no stream".
  std::string wait_name() const;
  // The rows that dispatch delivers: "bf16", "packed fp8", ...
  std::string mode() const;
  // Values of each row that the check of a dispatch compares, from `first` on. Usually all. With one check of
  // a large cast, for which the reference takes seconds, a window, which differs between ranks.
  struct Columns {
    std::uint32_t first = 0;
    std::uint32_t count = 0;
  };
  Columns checked_columns(std::uint32_t rank) const;
  // Every rank decides alike. Some: the first iteration, the last, and about four between. One: any of them.
  bool checks(std::uint32_t iteration) const;
};

// Throws kit::ToolError naming the bad value and what is allowed.
void validate(const RunPlan& plan);

// How to reach the daemon.
struct DaemonPlan {
  std::string socket;   // of a running daemon; empty: start one
  std::string program;  // path of epd; empty: beside epbench
};

struct SuiteRun {
  RunPlan plan;
  std::string label;  // for the progress line
};

// The fixed sets of runs behind the tables in kernels/PERFORMANCE.md. Backend host: ranks 1/2/4 x (tokens
// 128/4096 x (dispatch bf16, combine bf16, dispatch fp8), noop, layout expert at 128 and packed at 4096
// tokens, dispatch and combine each); H 7168, E 256, K 8. Backend cuda: the same H, E, K; the plan's ranks:
// noop, compact 4096 tokens with 24 and with 8 SMs, 8192 tokens, zipf, expert at 128 tokens, packed at 4096;
// 2 ranks at 4096. Iterations, seed and devices are the plan's. `small`: fewer tokens, smaller rows.
std::vector<SuiteRun> suite_runs(const RunPlan& plan, bool small);
inline constexpr std::uint32_t kSuiteRanks = 4;

}  // namespace epd::bench
