// What one run does, validated.
#pragma once

#include "kernels/reference.h"
#include "kit/routing.h"

#include <cstdint>
#include <string>

namespace epd::bench {

enum class Operation { kDispatch, kCombine, kBoth, kNoop };
enum class CheckLevel { kAll, kSome, kNone };

struct RunPlan {
  Operation operation = Operation::kBoth;
  std::uint32_t ranks = 4;
  std::uint32_t tokens = 128;  // of each rank, in each call
  std::uint32_t hidden = 7168;
  std::uint32_t experts = 256;
  std::uint32_t topk = 8;
  std::uint32_t depth = 2;
  std::uint32_t sms = 0;  // 0: the device's default
  bool fp8 = false;
  bool weighted = false;  // combine weighs rows by topk_weights
  std::uint32_t iterations = 30;
  std::uint32_t warmup = 4;
  std::uint64_t seed = 1;
  CheckLevel check = CheckLevel::kSome;
  std::string routing = "uniform";

  bool does_dispatch() const { return operation == Operation::kDispatch || operation == Operation::kBoth; }
  bool does_combine() const { return operation == Operation::kCombine || operation == Operation::kBoth; }
  kernels::reference::GroupParams params() const { return {ranks, experts, hidden, topk, fp8}; }
  // Every rank decides alike: the first iteration, the last, and about four between.
  bool checks(std::uint32_t iteration) const;
};

// Throws kit::ToolError naming the bad value and what is allowed.
void validate(const RunPlan& plan);

// How the daemon is reached.
struct DaemonPlan {
  std::string socket;   // of a running daemon; empty: start one
  std::string program;  // path of epd; empty: beside epbench
};

}  // namespace epd::bench
