// cuLibrary*, cuKernel* and launches. Any image will do: the kernels are those that the fake knows by name.
#include "fake_cuda/bench_kernels.h"
#include "fake_cuda/kernel_protocol.h"
#include "fake_cuda/memory.h"
#include "fake_cuda/played_thread.h"
#include "fake_cuda/stream.h"
#include "fake_cuda/word_kernels.h"
#include "step.h"

#include <algorithm>
#include <array>
#include <cstring>

using namespace epd::fake_cuda;
using epd::kernels::cuda::kGateKernel;
using epd::kernels::cuda::kKernelNames;

namespace {

constexpr int kStaticBytes = 4608;  // of each kernel: an operation's copy and a few words
constexpr int kDefaultShared = 49152;
constexpr int kReservedShared = 1024;
constexpr std::size_t kMaxDevices = 64;
constexpr unsigned kMaxThreads = epd::kernels::kMaxThreads;

// One kernel of a library.
struct Kernel {
  std::string name;
  std::array<std::atomic<int>, kMaxDevices> dynamic_shared{};  // allowed, of each device
};

struct Library {
  std::vector<std::shared_ptr<Kernel>> kernels;
};

Table<Library>& libraries() {
  static auto* const table = new Table<Library>;
  return *table;
}
Table<Kernel>& kernels() {
  static auto* const table = new Table<Kernel>;
  return *table;
}

CUresult get_attribute(int* value, CUfunction_attribute which, const Kernel& kernel, int device) {
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  switch (which) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = kMaxThreads; return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = kStaticBytes; return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 128; return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = 90; return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *value = kernel.dynamic_shared[static_cast<std::size_t>(device)].load();
      return CUDA_SUCCESS;
    default: *value = 0; return which < CU_FUNC_ATTRIBUTE_MAX ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult set_attribute(CUfunction_attribute which, int value, Kernel& kernel, int device) {
  if (which == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) return CUDA_SUCCESS;
  const int most = driver()->settings.shared_memory - kStaticBytes;
  if (which != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 || value > most)
    return CUDA_ERROR_INVALID_VALUE;
  kernel.dynamic_shared[static_cast<std::size_t>(device)].store(value);
  return CUDA_SUCCESS;
}

struct Grid {
  unsigned ctas[3];
  unsigned threads[3];
  unsigned shared_bytes;
};

CUresult check_launch(const Kernel& kernel, const Stream& stream, const Grid& grid) {
  const unsigned threads = grid.threads[0] * grid.threads[1] * grid.threads[2];
  if (grid.ctas[0] == 0 || grid.ctas[1] != 1 || grid.ctas[2] != 1) return CUDA_ERROR_INVALID_VALUE;
  if (threads == 0 || threads != grid.threads[0]) return CUDA_ERROR_INVALID_VALUE;
  if (threads > kMaxThreads) return CUDA_ERROR_INVALID_VALUE;
  const int most = kernel.dynamic_shared[static_cast<std::size_t>(stream.device().ordinal)].load();
  if (grid.shared_bytes > static_cast<unsigned>(most)) return CUDA_ERROR_INVALID_VALUE;
  // Blocks of libepd's kernels need not run at the same time.
  if (grid.ctas[0] <= stream.num_sms() || is_word_kernel(kernel.name)) return CUDA_SUCCESS;
  // A true device would start as many as fit, which would wait for the rest for ever.
  complain(kernel.name + ": " + std::to_string(grid.ctas[0]) + " CTAs on " +
           std::to_string(stream.num_sms()) + " SMs can't all run at once");
  return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
}

// As enqueue(), of what is a kernel.
CUresult enqueue_kernel(CUstream handle, const Kernel& kernel, Stream::Work work) {
  return enqueue(handle, [name = kernel.name, work = std::move(work)](Stream& stream) {
    return stream.wait_until([&] { return stream.device().begins(name); }) && work(stream);
  });
}

// Those that a kernel holds until it ends.
class HeldSms {
 public:
  explicit HeldSms(Device& device) : device_(device) {}
  ~HeldSms() {
    if (held_.ctas != 0) device_.give_sms(held_);
  }
  HeldSms(const HeldSms&) = delete;
  HeldSms& operator=(const HeldSms&) = delete;

  // On the thread that plays the kernel.
  void take(const StayingKernel& kernel) {
    for (unsigned looks = 1; !device_.take_sms(kernel); ++looks) epd::ordered::look_again(looks);
    held_ = kernel;
  }

 private:
  Device& device_;
  StayingKernel held_;
};

// Those that change nothing here: a kernel begins when the one before it has ended, and none goes first.
CUresult check_attributes(const CUlaunchConfig& config) {
  if (config.numAttrs != 0 && config.attrs == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    switch (config.attrs[i].id) {
      case CU_LAUNCH_ATTRIBUTE_IGNORE:
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
      case CU_LAUNCH_ATTRIBUTE_PRIORITY: break;
      default:
        complain("cuLaunchKernelEx: launch attribute " + std::to_string(config.attrs[i].id) +
                 " is not faked; 6 (programmatic stream serialization) and 8 (priority) are");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return CUDA_SUCCESS;
}

template <typename Run>
bool run(Stream& stream, const Launch& launch, Run run_it) {
  KernelDevice device;
  device.reaches = [&](const void* address, std::size_t bytes) {
    return memory().accessible(stream.device().ordinal, address, bytes);
  };
  device.over = [&] { return stream.over(); };
  device.pause = [backoff = Backoff()](unsigned looks) mutable {
    if (looks == 1) backoff = Backoff();
    backoff.pause();
  };
  HeldSms sms(stream.device());
  device.take_sms = [&](unsigned ctas) { sms.take({ctas, launch.threads, launch.shared_bytes}); };
  std::string wrong;
  if (!play(stream, launch.kernel, [&] { wrong = run_it(launch, device); })) return false;
  return wrong.empty() ||
         stream.fault(launch.kernel + " on device " + std::to_string(stream.device().machine) + ": " + wrong);
}

CUresult launch(CUfunction function, const Grid& grid, CUstream handle, void** params, void** extra) {
  const std::shared_ptr<Kernel> kernel = kernels().find(function);
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (kernel == nullptr || stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (kernel->name == epd::kernels::cuda::kLaunchProbeKernel) {
    // At once, so that it tells of the device and not of the processor.
    return stream->device().begins(kernel->name)
               ? CUDA_SUCCESS
               : enqueue_kernel(handle, *kernel, [](Stream&) { return true; });
  }
  if (extra != nullptr || params == nullptr || params[0] == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (kernel->name == kGemmKernel) return enqueue_kernel(handle, *kernel, gemm_kernel(grid.ctas, params));
  if (is_layer_kernel(kernel->name))
    return enqueue_kernel(handle, *kernel, layer_kernel(kernel->name, grid.ctas, params));
  if (is_probe_kernel(kernel->name))
    return enqueue_kernel(handle, *kernel, probe_kernel(kernel->name, params));
  if (kernel->name == kStartBarrierKernel)
    return enqueue_kernel(handle, *kernel, start_barrier_kernel(params));
  if (const CUresult error = check_launch(*kernel, *stream, grid)) return error;
  if (is_word_kernel(kernel->name)) {
    if (Watcher* const sees = watcher()) {
      const char* const name = kernel->name.c_str();
      if (const CUresult given = sees->calls(name)) return given;
      sees->enqueues({.function = name, .stream = handle, .parameters = params});
    }
    static std::atomic<unsigned> launches{0};  // blocks run in any order
    Stream::Work work = word_kernel(kernel->name, grid.ctas[0], grid.threads[0], grid.shared_bytes, params,
                                    launches++ % 2 != 0);
    return work != nullptr ? enqueue_kernel(handle, *kernel, std::move(work)) : CUDA_ERROR_INVALID_VALUE;
  }
  const Launch how{kernel->name, grid.ctas[0], grid.threads[0], grid.shared_bytes};
  epd::kernels::WorkerArguments own;
  std::memcpy(&own, params[0], sizeof(own));
  return enqueue_kernel(handle, *kernel, [own, how, gate = kernel->name == kGateKernel](Stream& its) {
    return run(its, how, [&](const Launch& launch, const auto& device) {
      return gate ? run_gate(own, device) : run_main(launch, own, device);
    });
  });
}

}  // namespace

void epd::fake_cuda::count_libraries(Holdings& holdings) {
  holdings.libraries = libraries().size();
}

CUresult CUDAAPI cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned int,
                                   CUlibraryOption*, void**, unsigned int) {
  if (const CUresult error = enter("cuLibraryLoadData", Needs::kNothing)) return error;
  if (library == nullptr || code == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto made = std::make_shared<Library>();
  const auto add = [&made](const char* name) {
    const auto kernel = std::make_shared<Kernel>();
    kernel->name = name;
    for (auto& bytes : kernel->dynamic_shared) bytes.store(kDefaultShared - kStaticBytes - kReservedShared);
    kernels().add(kernel);
    made->kernels.push_back(kernel);
  };
  for (const char* const name : kKernelNames) add(name);
  for (const char* const name : epd::stream_kernels::kKernelNames) add(name);
  add(kGemmKernel);
  add(kStartBarrierKernel);
  for (const char* const name : kLayerKernels) add(name);
  for (const char* const name : kProbeKernels) add(name);
  *library = reinterpret_cast<CUlibrary>(libraries().add(made));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLibraryUnload(CUlibrary library) {
  if (const CUresult error = enter("cuLibraryUnload", Needs::kNothing)) return error;
  const std::shared_ptr<Library> known = libraries().remove(library);
  if (known == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  for (const auto& kernel : known->kernels) kernels().remove(kernel.get());
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  if (const CUresult error = enter("cuLibraryGetKernel", Needs::kNothing)) return error;
  const std::shared_ptr<Library> known = libraries().find(library);
  if (known == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (kernel == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto found = std::find_if(known->kernels.begin(), known->kernels.end(),
                                  [&](const auto& each) { return each->name == name; });
  if (found == known->kernels.end()) return CUDA_ERROR_NOT_FOUND;
  *kernel = reinterpret_cast<CUkernel>(found->get());
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  if (const CUresult error = enter("cuKernelGetFunction", Needs::kContext)) return error;
  if (kernels().find(kernel) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuKernelSetAttribute(CUfunction_attribute which, int value, CUkernel kernel,
                                      CUdevice device) {
  if (const CUresult error = enter("cuKernelSetAttribute", Needs::kNothing)) return error;
  const std::shared_ptr<Kernel> known = kernels().find(kernel);
  if (known == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (driver()->device(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (Watcher* const sees = watcher()) sees->sets_attribute(known->name.c_str(), which, value);
  return set_attribute(which, value, *known, device);
}

CUresult CUDAAPI cuKernelGetAttribute(int* value, CUfunction_attribute which, CUkernel kernel,
                                      CUdevice device) {
  if (const CUresult error = enter("cuKernelGetAttribute", Needs::kNothing)) return error;
  const std::shared_ptr<Kernel> known = kernels().find(kernel);
  if (known == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (driver()->device(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  return get_attribute(value, which, *known, device);
}

CUresult CUDAAPI cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
  if (const CUresult error = enter("cuFuncSetAttribute", Needs::kContext)) return error;
  const std::shared_ptr<Kernel> known = kernels().find(function);
  if (known == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return set_attribute(which, value, *known, current_context()->device.ordinal);
}

CUresult CUDAAPI cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction function) {
  if (const CUresult error = enter("cuFuncGetAttribute", Needs::kContext)) return error;
  const std::shared_ptr<Kernel> known = kernels().find(function);
  if (known == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return get_attribute(value, which, *known, current_context()->device.ordinal);
}

CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                                void** params, void** extra) {
  if (const CUresult error = enter("cuLaunchKernel", Needs::kContext)) return error;
  const Grid grid{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes};
  return launch(function, grid, stream, params, extra);
}

CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params,
                                  void** extra) {
  if (const CUresult error = enter("cuLaunchKernelEx", Needs::kContext)) return error;
  if (config == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult error = check_attributes(*config)) return error;
  const Grid grid{{config->gridDimX, config->gridDimY, config->gridDimZ},
                  {config->blockDimX, config->blockDimY, config->blockDimZ},
                  config->sharedMemBytes};
  return launch(function, grid, config->hStream, params, extra);
}

unsigned cuFakeStayingKernels(int device, StayingKernel* kernels, unsigned most) {
  Device* const its = driver() == nullptr ? nullptr : driver()->device(device);
  if (its == nullptr) return 0;
  const std::lock_guard lock(its->staying_mutex);
  std::copy_n(its->staying.begin(), std::min<std::size_t>(most, its->staying.size()), kernels);
  return static_cast<unsigned>(its->staying.size());
}
