#include "stream_kernels.h"

#include "enqueued.h"

#include <cstddef>

namespace epd::client {

// Null: the library was built without a CUDA compiler.
#ifdef EPD_CLIENT_HAS_KERNELS
extern "C" const std::byte epd_stream_kernels_image[];  // stream_kernels_image.S
static const void* image() {
  return epd_stream_kernels_image;
}
#else
static const void* image() {
  return nullptr;
}
#endif

StreamKernels::~StreamKernels() {
  if (library_ != nullptr) driver_.cuLibraryUnload(library_);
}

CUresult StreamKernels::take(CUdevice device, const char* name, CUkernel& kernel) {
  const CUresult error = driver_.cuLibraryGetKernel(&kernel, library_, name);
  if (error != CUDA_SUCCESS) return error;
  // While this kernel waits on an SM that is set up for little shared memory, no kernel that needs much can
  // begin there: not even the engine's kernel that it waits for.
  return driver_.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                                      CU_SHAREDMEM_CARVEOUT_MAX_SHARED, kernel, device);
}

// With lazy loading, the default, the driver loads a kernel at its first launch and waits for everything that
// runs in the context. That may be a wait that this launch must end, or one of another session. Asking for a
// handle does not load. A launch that has run has loaded all.
Status StreamKernels::load(CUdevice device, CUstream stream) {
  if (image() == nullptr) return {StatusCode::kUnsupported, "this libepd was built without CUDA's compiler"};
  CUresult error = driver_.cuLibraryLoadData(&library_, image(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (error == CUDA_SUCCESS) error = take(device, "epd_signal", signal_);
  if (error == CUDA_SUCCESS) error = take(device, "epd_wait", wait_);
  if (error == CUDA_SUCCESS) error = take(device, "epd_signal_and_wait", signal_and_wait_);
  if (error == CUDA_SUCCESS) error = take(device, "epd_enqueue", command_);
  if (error == CUDA_SUCCESS) error = take(device, "epd_await_call", await_call_);
  if (error == CUDA_SUCCESS) error = signal(stream, 0, 0);
  if (error == CUDA_SUCCESS) error = wait(stream, {});
  if (error == CUDA_SUCCESS) error = signal_and_wait(stream, 0, {});
  if (error == CUDA_SUCCESS) error = call(stream, {});
  if (error == CUDA_SUCCESS) error = await_call(stream, 0, 0, 0);
  if (error == CUDA_SUCCESS) error = driver_.cuStreamSynchronize(stream);
  if (error == CUDA_ERROR_NO_BINARY_FOR_GPU)
    return {StatusCode::kUnsupported, "this libepd has no kernels for this GPU"};
  return cuda_status(driver_, error, "loading libepd's kernels");
}

CUresult StreamKernels::launch(CUkernel kernel, CUstream stream, void** parameters) const {
  // A CUkernel is launched in the stream's context.
  return driver_.cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), 1, 1, 1, 1, 1, 1, 0, stream, parameters,
                                nullptr);
}

CUresult StreamKernels::signal(CUstream stream, std::uintptr_t ready, std::uint32_t value) const {
  void* parameters[] = {&ready, &value};
  return launch(signal_, stream, parameters);
}

CUresult StreamKernels::wait(CUstream stream, const StreamWait& wait) const {
  StreamWait w = wait;
  void* parameters[] = {&w.word, &w.value, &w.limit_ns};
  return launch(wait_, stream, parameters);
}

CUresult StreamKernels::signal_and_wait(CUstream stream, std::uintptr_t ready, const StreamWait& wait) const {
  StreamWait w = wait;
  void* parameters[] = {&ready, &w.word, &w.value, &w.limit_ns};
  return launch(signal_and_wait_, stream, parameters);
}

CUresult StreamKernels::call(CUstream stream, const StreamCall& call) const {
  std::uintptr_t words = call.words;
  stream_kernels::Enqueued its{call.call, call.waits ? 1u : 0u,
                               reinterpret_cast<const std::uint32_t*>(call.num_tokens_at),  // NOLINT
                               call.limit_ns};
  void* parameters[] = {&words, &its};
  return launch(command_, stream, parameters);
}

CUresult StreamKernels::await_call(CUstream stream, std::uintptr_t words, std::uint32_t slot,
                                   std::uint64_t limit_ns) const {
  void* parameters[] = {&words, &slot, &limit_ns};
  return launch(await_call_, stream, parameters);
}

}  // namespace epd::client
