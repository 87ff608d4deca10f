#include "cuda_driver.h"

#include <dlfcn.h>
#include <mutex>

namespace epd::client {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

#define EPD_CUDA_TEXT(symbol) #symbol

// False if the driver has no such symbol.
template <typename Function>
bool find(void* library, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, symbol));
  return function != nullptr;
}

}  // namespace

Status load_cuda_driver(const CudaDriver*& out) {
  static std::mutex mutex;  // guards both below
  static CudaDriver driver;
  static bool loaded = false;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!loaded) {
    // Never closed: the driver has threads and exit handlers, and the process may use it too.
    void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* why = ::dlerror();
      return {StatusCode::kUnsupported,
              "a session on a CUDA device needs NVIDIA's driver library in this process: " +
                  std::string(why != nullptr ? why : kLibrary)};
    }
#define EPD_CUDA_FIND(function)                                                                \
  if (!find(library, EPD_CUDA_TEXT(function), driver.function)) {                              \
    return {StatusCode::kUnsupported,                                                          \
            std::string(kLibrary) +                                                            \
                " has no " EPD_CUDA_TEXT(function) "; needed: a driver for CUDA 12 or newer"}; \
  }
    EPD_CUDA_FUNCTIONS(EPD_CUDA_FIND)
#undef EPD_CUDA_FIND
    loaded = true;
  }
  out = &driver;
  return {};
}

std::string error_name(const CudaDriver& driver, CUresult error) {
  const char* name = nullptr;
  if (driver.cuGetErrorName(error, &name) == CUDA_SUCCESS && name != nullptr) return name;
  return "CUDA error " + std::to_string(static_cast<int>(error));
}

Status cuda_status(const CudaDriver& driver, CUresult error, const std::string& what) {
  if (error == CUDA_SUCCESS) return {};
  // While MPS recovers from a fault it accepts no process. The caller may try again.
  const StatusCode code = error == CUDA_ERROR_OUT_OF_MEMORY          ? StatusCode::kResourceExhausted
                          : error == CUDA_ERROR_MPS_SERVER_NOT_READY ? StatusCode::kWouldBlock
                                                                     : StatusCode::kInternal;
  return {code, what + ": " + error_name(driver, error)};
}

}  // namespace epd::client
