#include "signal_look.h"

#include "cuda_device.h"

#include <atomic>
#include <cstring>

namespace epd::device {

namespace {

constexpr std::uint64_t kPauseNs = 50'000'000;

}  // namespace

SignalLook::SignalLook(CudaDevice& device, const LaneShape& shape)
    : device_(device),
      shape_(shape),
      copy_(shape.shape.num_ranks, shape.limits.depth,
            shape.inbox.max_tokens != 0 && shape.shape.per_expert) {}

// `ready` is the first part of a block; `arrived` and `called` follow it.
std::size_t SignalLook::row_bytes() const {
  return std::size_t{3} * shape_.shape.num_ranks * sizeof(abi::SignalLine);
}

std::size_t SignalLook::host_bytes() const {
  return row_bytes() * shape_.limits.depth + sizeof(abi::SignalLine);
}

std::uint32_t& SignalLook::number() const {
  return *reinterpret_cast<std::uint32_t*>(host_ + row_bytes() * shape_.limits.depth);
}

void SignalLook::begin() {
  if (under_way() || shape_.exchange == nullptr) return;
  under_way_ = true;
  begun_ns_ = device_.now_ns();
  device_.read_aside(host_, shape_.exchange->bytes(), row_bytes(), shape_.block_bytes, shape_.limits.depth,
                     &number(), ++looks_);
}

void SignalLook::begin_now_and_then() {
  if (device_.now_ns() >= begun_ns_ + kPauseNs) begin();
}

bool SignalLook::under_way() {
  if (!under_way_ || std::atomic_ref(number()).load(std::memory_order_acquire) != looks_) return under_way_;
  under_way_ = false;
  const std::span<abi::SignalLine> lines = copy_.lines();
  std::memcpy(lines.data(), host_, lines.size_bytes());
  copy_.begun_ns = begun_ns_;
  return false;
}

const SignalCopy* SignalLook::seen() {
  under_way();
  return copy_.begun_ns != 0 ? &copy_ : nullptr;
}

}  // namespace epd::device
