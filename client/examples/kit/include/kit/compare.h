// Poison outputs, make an oracle's inputs, compare bit for bit with kernels/reference.
#pragma once

#include "epd/epd.h"
#include "kernels/reference.h"

#include <cstdint>
#include <span>
#include <string>

namespace epd::kit {

// Finite bf16 values of both signs, magnitudes 2^-7..2. The same for the same seed; count a multiple of 4.
void fill_bf16(std::uint64_t seed, std::uint16_t* out, std::size_t count);

// Fills every output region that dispatch or combine delivers with a pattern neither produces.
void poison_dispatch(const kernels::reference::GroupParams& params, std::uint32_t max_tokens,
                     const epd_buffers_t& buffers);
void poison_combine(const kernels::reference::GroupParams& params, std::uint32_t max_tokens,
                    const epd_buffers_t& buffers);

// Copies of one rank's int32 choices and weights in the oracle's form; x may be null: left empty.
struct InputView {
  std::uint32_t num_tokens = 0;
  const std::uint16_t* x = nullptr;
  const std::int32_t* topk_idx = nullptr;
  const float* topk_weights = nullptr;
};
kernels::reference::RankInput make_input(const kernels::reference::GroupParams& params,
                                         const InputView& view);

// "" if every bit that the operation delivers is as expected, else the first difference. Groups have
// int32 indices.
std::string compare_dispatch(const kernels::reference::GroupParams& params,
                             const kernels::reference::RankReceived& expected, std::uint32_t num_recv_rows,
                             const epd_buffers_t& got);
std::string compare_combine(const kernels::reference::GroupParams& params,
                            std::span<const std::uint16_t> expected, const epd_buffers_t& got);

}  // namespace epd::kit
