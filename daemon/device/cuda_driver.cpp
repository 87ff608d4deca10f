#include "cuda_driver.h"

#include <dlfcn.h>

namespace epd::device {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

Status unsupported(std::string text) {
  return {StatusCode::kUnsupported, std::move(text)};
}

// Names with their versions, as cuda.h maps them.
#define EPD_TEXT_OF(name) #name
#define EPD_TEXT(name) EPD_TEXT_OF(name)

// `absent`: the machine has no driver, or no GPU.
Status load(CudaDriver& driver, bool& absent) {
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);  // kept for the life of the process
  absent = library == nullptr;
  if (absent) return unsupported(std::string("no CUDA driver on this machine: ") + ::dlerror());
#define EPD_CUDA_LOAD(name)                                                                              \
  driver.name = reinterpret_cast<decltype(driver.name)>(::dlsym(library, EPD_TEXT(name)));               \
  if (driver.name == nullptr) {                                                                          \
    return unsupported(std::string(kLibrary) + " has no " EPD_TEXT(name) "; needed: a driver of CUDA " + \
                       std::to_string(CUDA_VERSION / 1000) + " or newer");                               \
  }
  EPD_CUDA_FUNCTIONS(EPD_CUDA_LOAD)
#undef EPD_CUDA_LOAD
  const CUresult result = driver.cuInit(0);
  absent = result == CUDA_ERROR_NO_DEVICE;
  return result == CUDA_SUCCESS ? Status() : driver.refused(StatusCode::kUnsupported, "", "cuInit", result);
}

struct Loaded {
  CudaDriver driver;
  bool absent = false;
  Status status = load(driver, absent);
};

const Loaded& loaded() {
  static const Loaded it;
  return it;
}

}  // namespace

std::string CudaDriver::describe(const char* what, CUresult result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &text);
  return std::string(what) + ": " + (name != nullptr ? name : std::to_string(result)) + " (" +
         (text != nullptr ? text : "unknown to this driver") + ")";
}

Status CudaDriver::refused(StatusCode otherwise, const std::string& where, const char* what,
                           CUresult result) const {
  const StatusCode code = result == CUDA_ERROR_MPS_SERVER_NOT_READY ? StatusCode::kWouldBlock : otherwise;
  return {code, where + describe(what, result)};
}

Result<const CudaDriver*> cuda_driver() {
  const Loaded& it = loaded();
  if (!it.status.ok()) return it.status;
  return &it.driver;
}

Result<std::uint32_t> num_cuda_devices() {
  const Loaded& it = loaded();
  if (it.absent) return 0u;
  if (!it.status.ok()) return it.status;
  int count = 0;
  const CUresult result = it.driver.cuDeviceGetCount(&count);
  if (result != CUDA_SUCCESS) return unsupported(it.driver.describe("cuDeviceGetCount", result));
  return static_cast<std::uint32_t>(count);
}

}  // namespace epd::device
