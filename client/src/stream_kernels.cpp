#include "stream_kernels.h"

#include <algorithm>
#include <cstddef>

namespace epd::client {

using stream_kernels::Copying;
using stream_kernels::FewStep;
using stream_kernels::StagedStep;

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

CUresult StreamKernels::take(CUdevice device, std::uint32_t number) {
  CUkernel& kernel = kernels_[number];
  const CUresult error = driver_.cuLibraryGetKernel(&kernel, library_, stream_kernels::kKernelNames[number]);
  if (error != CUDA_SUCCESS) return error;
  // While this kernel waits on an SM that is set up for little shared memory, no kernel that needs much can
  // begin there: not even the engine's kernel that it waits for.
  return driver_.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                                      CU_SHAREDMEM_CARVEOUT_MAX_SHARED, kernel, device);
}

// Under lazy loading, the default, the driver loads a kernel at its first launch and waits for everything
// that runs in the context. That may be a wait that this launch must end, or one of another session. Asking
// for a handle does not load. A launch that has run has loaded all.
Status StreamKernels::load(CUdevice device, CUstream stream) {
  if (image() == nullptr) return {StatusCode::kUnsupported, "this libepd was built without CUDA's compiler"};
  CUresult error = driver_.cuLibraryLoadData(&library_, image(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  for (std::uint32_t i = 0; error == CUDA_SUCCESS && i < kernels_.size(); ++i) error = take(device, i);
  for (std::uint32_t i = 0; error == CUDA_SUCCESS && i < kernels_.size(); ++i)
    error = launch_nothing(stream, i);
  if (error == CUDA_SUCCESS) error = driver_.cuStreamSynchronize(stream);
  if (error == CUDA_ERROR_NO_BINARY_FOR_GPU)
    return {StatusCode::kUnsupported, "this libepd has no kernels for this GPU"};
  return cuda_status(driver_, error, "loading libepd's kernels");
}

template <typename Step>
CUresult StreamKernels::launch(CUstream stream, std::uint32_t number, const Step& step) const {
  const stream_kernels::Launch how = stream_kernels::launch_of(step);
  void* parameters[] = {const_cast<Step*>(&step)};
  // A CUkernel is launched in the stream's context, and in less time than the context's CUfunction (H200).
  return driver_.cuLaunchKernel(reinterpret_cast<CUfunction>(kernels_[number]), how.blocks, 1, 1, how.threads,
                                1, 1, how.shared_bytes, stream, parameters, nullptr);
}

CUresult StreamKernels::launch_nothing(CUstream stream, std::uint32_t number) const {
  const bool few = stream_kernels::copying_of(number) == Copying::kFew;
  return few ? launch(stream, number, FewStep()) : launch(stream, number, StagedStep());
}

CUresult StreamKernels::launch(CUstream stream, abi::Op op, const StagedStep& step) const {
  // A kernel that copies nothing takes the Step alone.
  if (step.staging == nullptr) return launch(stream, stream_kernels::kernel_of(op, Copying::kNothing), step);
  FewStep few;
  if (few_of(step, few)) return launch(stream, stream_kernels::kernel_of(op, Copying::kFew), few);
  return launch(stream, stream_kernels::kernel_of(op, Copying::kPieces), step);
}

}  // namespace epd::client
