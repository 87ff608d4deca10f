// The kernels of the client library: their code is client/src/stream_words.h and stream_copies.h.
#pragma once

#include "fake_cuda/stream.h"

#include <string>

namespace epd::fake_cuda {

bool is_word_kernel(const std::string& kernel);
// A launch of one of them as the stream's work; the parameters are copied now. Its blocks run one after the
// other, the last one first if `backwards`. Null: it may not be launched so.
Stream::Work word_kernel(const std::string& kernel, unsigned blocks, unsigned threads, unsigned shared_bytes,
                         void** parameters, bool backwards);

}  // namespace epd::fake_cuda
