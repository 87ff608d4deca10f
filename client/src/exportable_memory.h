// GPU memory for callers, made so that it can be passed on by descriptor (epd_memory_alloc).
#pragma once

#include "errors.h"

#include <cstddef>

namespace epd::client {

// `device` as CUDA numbers it in this process. UNSUPPORTED: no driver, or the library was built without
// cuda.h.
Status allocate_exportable(std::size_t bytes, int device, void*& out);
// Waits for the GPU's work in the thread's context and in the primary one. If that fails, nothing is freed.
Status free_exportable(void* address);

}  // namespace epd::client
