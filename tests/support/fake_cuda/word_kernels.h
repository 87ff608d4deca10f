// The kernels of the client library: their code is client/src/stream_words.h.
#pragma once

#include "fake_cuda/stream.h"

#include <array>
#include <string>

namespace epd::fake_cuda {

inline constexpr std::array<const char*, 5> kWordKernels{"epd_signal", "epd_wait", "epd_signal_and_wait",
                                                         "epd_enqueue", "epd_await_call"};

bool is_word_kernel(const std::string& kernel);
// A launch of one of them as the stream's work; the parameters are copied now.
Stream::Work word_kernel(const std::string& kernel, void** parameters);

}  // namespace epd::fake_cuda
