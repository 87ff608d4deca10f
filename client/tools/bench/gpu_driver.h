// The functions of CUDA's driver that epbench calls, found at run time and declared by hand: it is built
// without cuda.h too, and nothing links libcuda.
#pragma once

#include <cstddef>
#include <cstdint>

namespace epd::bench {

using GpuAddress = unsigned long long;

// member, symbol, parameters. Contexts, streams, events, graphs, libraries and kernels are opaque pointers,
// devices and results ints.
#define EPD_GPU_FUNCTIONS(X)                                                                          \
  X(init, "cuInit", (unsigned))                                                                       \
  X(error_name, "cuGetErrorName", (int, const char**))                                                \
  X(device_count, "cuDeviceGetCount", (int*))                                                         \
  X(device, "cuDeviceGet", (int*, int))                                                               \
  X(device_name, "cuDeviceGetName", (char*, int, int))                                                \
  X(attribute, "cuDeviceGetAttribute", (int*, int, int))                                              \
  X(retain_primary, "cuDevicePrimaryCtxRetain", (void**, int))                                        \
  X(release_primary, "cuDevicePrimaryCtxRelease_v2", (int))                                           \
  X(set_current, "cuCtxSetCurrent", (void*))                                                          \
  X(create_stream, "cuStreamCreate", (void**, unsigned))                                              \
  X(destroy_stream, "cuStreamDestroy_v2", (void*))                                                    \
  X(create_event, "cuEventCreate", (void**, unsigned))                                                \
  X(destroy_event, "cuEventDestroy_v2", (void*))                                                      \
  X(record_event, "cuEventRecord", (void*, void*))                                                    \
  X(record_event_as, "cuEventRecordWithFlags", (void*, void*, unsigned))                              \
  X(query_event, "cuEventQuery", (void*))                                                             \
  X(allocate, "cuMemAlloc_v2", (GpuAddress*, std::size_t))                                            \
  X(free, "cuMemFree_v2", (GpuAddress))                                                               \
  X(put, "cuMemcpyHtoDAsync_v2", (GpuAddress, const void*, std::size_t, void*))                       \
  X(get, "cuMemcpyDtoHAsync_v2", (void*, GpuAddress, std::size_t, void*))                             \
  X(fill, "cuMemsetD8Async", (GpuAddress, unsigned char, std::size_t, void*))                         \
  X(begin_capture, "cuStreamBeginCapture_v2", (void*, int))                                           \
  X(end_capture, "cuStreamEndCapture", (void*, void**))                                               \
  X(instantiate, "cuGraphInstantiateWithFlags", (void**, void*, unsigned long long))                  \
  X(launch_graph, "cuGraphLaunch", (void*, void*))                                                    \
  X(destroy_graph, "cuGraphDestroy", (void*))                                                         \
  X(destroy_executable, "cuGraphExecDestroy", (void*))                                                \
  X(register_host, "cuMemHostRegister_v2", (void*, std::size_t, unsigned))                            \
  X(unregister_host, "cuMemHostUnregister", (void*))                                                  \
  X(load, "cuLibraryLoadData", (void**, const void*, void*, void*, unsigned, void*, void*, unsigned)) \
  X(kernel, "cuLibraryGetKernel", (void**, void*, const char*))                                       \
  X(launch, "cuLaunchKernel",                                                                         \
    (void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**))

struct GpuDriver {
// NOLINTNEXTLINE(bugprone-macro-parentheses): the name of a member, and its parameters
#define EPD_GPU_MEMBER(member, symbol, parameters) int(*member) parameters = nullptr;
  EPD_GPU_FUNCTIONS(EPD_GPU_MEMBER)
#undef EPD_GPU_MEMBER
  int (*elapsed)(float*, void*, void*) = nullptr;  // cuEventElapsedTime, whichever version there is

  // Null if the library has no such symbol.
  void* find(const char* symbol) const;
  // Throws kit::ToolError "<what>: <error name>" unless `result` is 0.
  void require(int result, const char* what) const;

  void* library = nullptr;
};

// Opened at the first call, for the life of the process; cuInit has been called. Throws kit::ToolError. Not
// in a process that forks others which use the driver.
const GpuDriver& gpu_driver();

// GPUs that processes like this one see; found by a process of its own, so that this one may fork. Throws
// kit::ToolError if there is none.
std::uint32_t count_gpus();

// The kernels that epbench launches by itself (gpu_kernels.cu). Loads the image. It stays loaded until the
// process ends.
class GpuImage {
 public:
  // Throws kit::ToolError if there are none: epbench was built without nvcc.
  explicit GpuImage(const GpuDriver& driver);

  void* kernel(const char* name) const;
  struct Grid {
    unsigned ctas[2] = {1, 1};
    unsigned batch = 1;  // in the third direction
    unsigned threads = 1;
    unsigned shared_bytes = 0;
  };
  void launch(void* kernel, const Grid& grid, void* stream, void** arguments) const;

 private:
  const GpuDriver& driver_;
  void* library_ = nullptr;
};

}  // namespace epd::bench
