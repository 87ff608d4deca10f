#include "support/cuda_memory.h"

#include "support/ranks.h"

#include <dlfcn.h>
#include <string>

namespace epd::test {
namespace {

// What of the driver a copy needs, by hand: this is built without its header too.
struct Driver {
  using Address = unsigned long long;
  int (*init)(unsigned int) = nullptr;
  int (*retain)(void**, int) = nullptr;
  int (*set_current)(void*) = nullptr;
  int (*synchronize)() = nullptr;
  int (*to_device)(Address, const void*, std::size_t) = nullptr;
  int (*from_device)(void*, Address, std::size_t) = nullptr;

  Driver() {
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW);
    RANK_CHECK(library != nullptr, "libcuda.so.1 can't be opened");
    const auto find = [library](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
      RANK_CHECK(function != nullptr, std::string(name));
    };
    find(init, "cuInit");
    find(retain, "cuDevicePrimaryCtxRetain");
    find(set_current, "cuCtxSetCurrent");
    find(synchronize, "cuCtxSynchronize");
    find(to_device, "cuMemcpyHtoD_v2");
    find(from_device, "cuMemcpyDtoH_v2");
    RANK_CHECK(init(0) == 0, "cuInit");
  }

  void use(int gpu) const {
    void* context = nullptr;  // retained once more each time: the process's until it ends
    RANK_CHECK(retain(&context, gpu) == 0 && set_current(context) == 0,
               "no context on GPU " + std::to_string(gpu));
  }
};

const Driver& driver() {
  static const Driver loaded;
  return loaded;
}

void check(int result, const char* what) {
  RANK_CHECK(result == 0, std::string(what) + " gave " + std::to_string(result));
}

}  // namespace

bool has_cuda_driver() {
  static const bool found = [] {
    void* library = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library != nullptr) ::dlclose(library);
    return library != nullptr;
  }();
  return found;
}

void copy_to_gpu(int gpu, void* to, const void* from, std::size_t bytes) {
  driver().use(gpu);
  check(driver().to_device(reinterpret_cast<Driver::Address>(to), from, bytes), "cuMemcpyHtoD");
  check(driver().synchronize(), "cuCtxSynchronize");  // the copy returns when it has read the host's memory
}

void copy_from_gpu(int gpu, void* to, const void* from, std::size_t bytes) {
  driver().use(gpu);
  check(driver().from_device(to, reinterpret_cast<Driver::Address>(from), bytes), "cuMemcpyDtoH");
}

}  // namespace epd::test
