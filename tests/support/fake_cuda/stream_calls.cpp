// cuStream*, cuLaunchHostFunc, copies and fills.
#include "fake_cuda/memory.h"
#include "fake_cuda/stream.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

using namespace epd::fake_cuda;

namespace {

// The fault that a true device would report for an address that it does not reach.
bool fault(Stream& stream, const char* what, const void* address, std::size_t bytes) {
  char text[160];
  std::snprintf(text, sizeof(text), "%s: %zu bytes at %p are not memory of device %d, or mapped for it", what,
                bytes, address, stream.device().machine);
  return stream.fault(text);
}

CUresult create(CUstream* stream, unsigned int flags) {
  if ((flags & ~static_cast<unsigned>(CU_STREAM_NON_BLOCKING)) != 0) return CUDA_ERROR_INVALID_VALUE;
  return make_stream(current_context(), (flags & CU_STREAM_NON_BLOCKING) == 0, stream);
}

template <typename Word, typename Signed>
bool satisfied(Word now, Word value, unsigned int condition) {
  switch (condition) {
    case CU_STREAM_WAIT_VALUE_EQ: return now == value;
    case CU_STREAM_WAIT_VALUE_AND: return (now & value) != 0;
    case CU_STREAM_WAIT_VALUE_NOR: return static_cast<Word>(~(now | value)) != 0;
    default: return static_cast<Signed>(now - value) >= 0;
  }
}

// A word is aligned, and memory of the device or pinned.
template <typename Word>
CUresult check_word(CUstream stream, CUdeviceptr address) {
  if (find_stream(stream) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (address == 0 || address % sizeof(Word) != 0) return CUDA_ERROR_INVALID_VALUE;
  return memory().known(pointer(address), sizeof(Word)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

template <typename Word, typename Signed>
CUresult wait_value(CUstream handle, CUdeviceptr address, Word value, unsigned int flags) {
  if (flags > CU_STREAM_WAIT_VALUE_NOR) return CUDA_ERROR_INVALID_VALUE;  // and no flush, as on most devices
  if (const CUresult error = check_word<Word>(handle, address)) return error;
  return enqueue(handle, [=](Stream& stream) {
    auto* const word = static_cast<Word*>(pointer(address));
    bool reached = true;
    const bool good = stream.wait_until([&] {
      bool there = false;
      reached = memory().with(stream.device().ordinal, word, sizeof(Word), [&] {
        there = satisfied<Word, Signed>(std::atomic_ref(*word).load(std::memory_order_acquire), value, flags);
      });
      return there || !reached;
    });
    return reached ? good : fault(stream, "cuStreamWaitValue", word, sizeof(Word));
  });
}

template <typename Word>
CUresult write_value(CUstream handle, CUdeviceptr address, Word value, unsigned int flags) {
  if (flags != CU_STREAM_WRITE_VALUE_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult error = check_word<Word>(handle, address)) return error;
  return enqueue(handle, [=](Stream& stream) {
    auto* const word = static_cast<Word*>(pointer(address));
    if (!stream.wait_until([&] { return stream.device().writes_words(); })) return false;
    if (memory().with(stream.device().ordinal, word, sizeof(Word),
                      [&] { std::atomic_ref(*word).store(value, std::memory_order_release); })) {
      return true;
    }
    return fault(stream, "cuStreamWriteValue", word, sizeof(Word));
  });
}

// The ends of a copy that have to be memory which the driver knows.
struct Ends {
  bool to;
  bool from;
};

bool reachable(const void* to, const void* from, std::size_t bytes, Ends device) {
  return (!device.to || memory().known(to, bytes)) && (!device.from || memory().known(from, bytes));
}

// Words that kernels and clients write meanwhile come whole, as by a device's copy.
void copy_bytes(void* to, const void* from, std::size_t bytes) {
  constexpr std::size_t kMostWords = 4096;
  const auto divided_by = [&](std::size_t unit) {
    return (reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from) | bytes) % unit ==
           0;
  };
  const auto copy = [&]<typename Word>(Word*) {
    auto* const source = static_cast<Word*>(const_cast<void*>(from));  // NOLINT: only read
    for (std::size_t i = 0; i < bytes / sizeof(Word); ++i)
      static_cast<Word*>(to)[i] = std::atomic_ref(source[i]).load(std::memory_order_relaxed);
  };
  if (bytes <= kMostWords && divided_by(sizeof(std::uint64_t))) {
    copy(static_cast<std::uint64_t*>(nullptr));
  } else if (bytes <= kMostWords && divided_by(sizeof(std::uint32_t))) {
    copy(static_cast<std::uint32_t*>(nullptr));
  } else {
    std::memmove(to, from, bytes);
  }
}

CUresult copy_now(const char* function, void* to, const void* from, std::size_t bytes, Ends device) {
  if (const CUresult error = enter(function, Needs::kContext)) return error;
  if (!reachable(to, from, bytes, device)) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult error = synchronise_blocking(*current_context())) return error;
  if (bytes != 0) std::memmove(to, from, bytes);
  return CUDA_SUCCESS;
}

// From memory that is not pinned a copy is taken at once, as by the true driver, which stages it; into such
// memory the call waits.
CUresult enqueue_copy(void* to, const void* from, std::size_t bytes, Ends device, CUstream handle) {
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (!reachable(to, from, bytes, device)) return CUDA_ERROR_INVALID_VALUE;
  if (bytes == 0) return CUDA_SUCCESS;
  std::vector<char> staged;
  const bool from_pageable = !memory().known(from, bytes);
  const bool to_pageable = !memory().known(to, bytes);
  if ((from_pageable || to_pageable) && !stream->may_wait()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (from_pageable) {
    const auto* const first = static_cast<const char*>(from);
    staged.assign(first, first + bytes);
  }
  const CUresult error = enqueue(handle, [=, staged = std::move(staged)](Stream& own) {
    const void* const source = from_pageable ? staged.data() : from;
    const Memory::Bytes target{to, to_pageable ? 0 : bytes};
    const Memory::Bytes origin{source, from_pageable ? 0 : bytes};
    if (memory().with(-1, {target, origin}, [&] { copy_bytes(to, source, bytes); })) return true;
    return fault(own, "a copy", memory().known(to, target.bytes) ? from : to, bytes);
  });
  return error == CUDA_SUCCESS && to_pageable ? stream->synchronise() : error;
}

CUresult copy_later(const char* function, void* to, const void* from, std::size_t bytes, Ends device,
                    CUstream handle) {
  if (const CUresult error = enter(function, Needs::kContext)) return error;
  return enqueue_copy(to, from, bytes, device, handle);
}

// Copies from the device into the host's memory, whose rows lie one after the other; nothing else is needed.
CUresult copy_rows(const CUDA_MEMCPY2D& copy, CUstream handle) {
  const bool known = copy.srcMemoryType == CU_MEMORYTYPE_DEVICE && copy.dstMemoryType == CU_MEMORYTYPE_HOST &&
                     copy.srcXInBytes == 0 && copy.srcY == 0 && copy.dstXInBytes == 0 && copy.dstY == 0;
  if (!known) return CUDA_ERROR_NOT_SUPPORTED;
  if (copy.srcPitch < copy.WidthInBytes || copy.dstPitch != copy.WidthInBytes)
    return CUDA_ERROR_INVALID_VALUE;
  for (std::size_t row = 0; row < copy.Height; ++row) {
    const CUresult error =
        enqueue_copy(static_cast<char*>(copy.dstHost) + row * copy.dstPitch,
                     pointer(copy.srcDevice + row * copy.srcPitch), copy.WidthInBytes, {false, true}, handle);
    if (error != CUDA_SUCCESS) return error;
  }
  return CUDA_SUCCESS;
}

template <typename Unit>
CUresult fill(const char* function, CUdeviceptr to, Unit unit, std::size_t count, CUstream handle,
              bool wait) {
  if (const CUresult error = enter(function, Needs::kContext)) return error;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  const std::size_t bytes = count * sizeof(Unit);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (to % sizeof(Unit) != 0 || !memory().known(pointer(to), bytes)) return CUDA_ERROR_INVALID_VALUE;
  const CUresult error = enqueue(handle, [=](Stream& own) {
    auto* const first = static_cast<Unit*>(pointer(to));
    if (memory().with(-1, first, bytes, [&] { std::fill_n(first, count, unit); })) return true;
    return fault(own, "a fill", first, bytes);
  });
  return error == CUDA_SUCCESS && wait ? stream->synchronise() : error;
}

}  // namespace

CUresult CUDAAPI cuStreamCreate(CUstream* stream, unsigned int flags) {
  if (const CUresult error = enter("cuStreamCreate", Needs::kContext)) return error;
  return create(stream, flags);
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int priority) {
  if (const CUresult error = enter("cuStreamCreateWithPriority", Needs::kContext)) return error;
  if (Watcher* const sees = watcher()) sees->makes_stream(flags, priority);
  return create(stream, flags);
}

CUresult CUDAAPI cuStreamDestroy(CUstream handle) {
  if (const CUresult error = enter("cuStreamDestroy", Needs::kNothing)) return error;
  if (handle == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  destroy_stream(stream);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamSynchronize(CUstream handle) {
  if (const CUresult error = enter("cuStreamSynchronize", Needs::kContext)) return error;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (!stream->may_wait() || !beside_captures()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return handle == nullptr ? synchronise_blocking(*current_context()) : stream->synchronise();
}

CUresult CUDAAPI cuStreamQuery(CUstream handle) {
  if (const CUresult error = enter("cuStreamQuery", Needs::kContext)) return error;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return stream->may_wait() ? stream->query() : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult CUDAAPI cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                     unsigned int flags) {
  if (const CUresult error = enter("cuStreamWaitValue32", Needs::kContext)) return error;
  if (Watcher* const sees = watcher()) sees->enqueues({"cuStreamWaitValue32", stream, address, value, flags});
  return wait_value<std::uint32_t, std::int32_t>(stream, address, value, flags);
}

CUresult CUDAAPI cuStreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                     unsigned int flags) {
  if (const CUresult error = enter("cuStreamWaitValue64", Needs::kContext)) return error;
  return wait_value<std::uint64_t, std::int64_t>(stream, address, value, flags);
}

CUresult CUDAAPI cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                      unsigned int flags) {
  if (const CUresult error = enter("cuStreamWriteValue32", Needs::kContext)) return error;
  if (Watcher* const sees = watcher())
    sees->enqueues({"cuStreamWriteValue32", stream, address, value, flags});
  return write_value<std::uint32_t>(stream, address, value, flags);
}

CUresult CUDAAPI cuStreamWriteValue64(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                      unsigned int flags) {
  if (const CUresult error = enter("cuStreamWriteValue64", Needs::kContext)) return error;
  return write_value<std::uint64_t>(stream, address, value, flags);
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  if (const CUresult error = enter("cuLaunchHostFunc", Needs::kContext)) return error;
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return enqueue(stream, [=](Stream&) {
    function(data);
    return true;
  });
}

CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr to, const void* from, std::size_t bytes) {
  return copy_now("cuMemcpyHtoD", pointer(to), from, bytes, {true, false});
}
CUresult CUDAAPI cuMemcpyDtoH(void* to, CUdeviceptr from, std::size_t bytes) {
  return copy_now("cuMemcpyDtoH", to, pointer(from), bytes, {false, true});
}
CUresult CUDAAPI cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
  return copy_now("cuMemcpyDtoD", pointer(to), pointer(from), bytes, {true, true});
}
CUresult CUDAAPI cuMemcpy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
  return copy_now("cuMemcpy", pointer(to), pointer(from), bytes, {false, false});
}
CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, std::size_t bytes, CUstream stream) {
  return copy_later("cuMemcpyHtoDAsync", pointer(to), from, bytes, {true, false}, stream);
}
CUresult CUDAAPI cuMemcpyDtoHAsync(void* to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  const CUresult error = copy_later("cuMemcpyDtoHAsync", to, pointer(from), bytes, {false, true}, stream);
  if (Watcher* const sees = watcher(); sees != nullptr && error == CUDA_SUCCESS) sees->has_copied();
  return error;
}
CUresult CUDAAPI cuMemcpy2DAsync(const CUDA_MEMCPY2D* copy, CUstream stream) {
  if (const CUresult error = enter("cuMemcpy2DAsync", Needs::kContext)) return error;
  return copy == nullptr ? CUDA_ERROR_INVALID_VALUE : copy_rows(*copy, stream);
}
CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  return copy_later("cuMemcpyDtoDAsync", pointer(to), pointer(from), bytes, {true, true}, stream);
}
// Contexts say nothing that addresses do not.
CUresult CUDAAPI cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                                   CUcontext from_context, std::size_t bytes, CUstream stream) {
  for (const CUcontext context : {to_context, from_context}) {
    if (driver() == nullptr || driver()->contexts.find(context) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  }
  return copy_later("cuMemcpyPeerAsync", pointer(to), pointer(from), bytes, {true, true}, stream);
}
CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  return copy_later("cuMemcpyAsync", pointer(to), pointer(from), bytes, {false, false}, stream);
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t count, CUstream stream) {
  return fill<unsigned char>("cuMemsetD8Async", to, value, count, stream, false);
}
CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr to, unsigned int value, std::size_t count, CUstream stream) {
  return fill<unsigned int>("cuMemsetD32Async", to, value, count, stream, false);
}
CUresult CUDAAPI cuMemsetD8(CUdeviceptr to, unsigned char value, std::size_t count) {
  return fill<unsigned char>("cuMemsetD8", to, value, count, nullptr, true);
}
CUresult CUDAAPI cuMemsetD32(CUdeviceptr to, unsigned int value, std::size_t count) {
  return fill<unsigned int>("cuMemsetD32", to, value, count, nullptr, true);
}
