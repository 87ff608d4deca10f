// Poison outputs, make an oracle's inputs, compare bit for bit with kernels/reference.
#pragma once

#include "epd/epd.h"
#include "kernels/reference.h"

#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace epd::kit {

// Finite bf16 values of both signs, magnitudes 2^-7..2. The same for the same seed; count a multiple of 4.
void fill_bf16(std::uint64_t seed, std::uint16_t* out, std::size_t count);

// memset, or a replacement where the regions are not this process's memory.
using FillMemory = std::function<void(void* region, int byte, std::size_t bytes)>;
void fill_host_memory(void* region, int byte, std::size_t bytes);

// Fills every output region that dispatch or combine delivers with a pattern neither produces: of received
// rows those in `rows`, since a worst case is too much memory to touch.
void poison_dispatch(const kernels::reference::GroupParams& params, std::span<const kernels::RowRange> rows,
                     const epd_buffers_t& buffers, const FillMemory& fill = fill_host_memory);
void poison_combine(const kernels::reference::GroupParams& params, std::uint32_t max_tokens,
                    const epd_buffers_t& buffers, const FillMemory& fill = fill_host_memory);

// One rank's inputs with int32 choices. make_input copies them into the oracle's form; x and x_scales may be
// null and are then empty.
struct InputView {
  std::uint32_t num_tokens = 0;
  const void* x = nullptr;
  const std::int32_t* topk_idx = nullptr;
  const float* topk_weights = nullptr;
  const void* x_scales = nullptr;
};
kernels::reference::RankInput make_input(const kernels::reference::GroupParams& params,
                                         const InputView& view);

// "" if every bit that the operation delivers is as expected, else the first difference. Groups have
// int32 indices.
std::string compare_dispatch(const kernels::reference::GroupParams& params,
                             const kernels::reference::RankReceived& expected, std::uint32_t num_recv_rows,
                             const epd_buffers_t& got);
std::string compare_combine(const kernels::reference::GroupParams& params,
                            const kernels::reference::RankCombined& expected, const epd_buffers_t& got);

}  // namespace epd::kit
