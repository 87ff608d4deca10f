#include "ucx_library.h"

#include <dlfcn.h>
#include <memory>
#include <mutex>

namespace epd::transport {
namespace {

constexpr std::uint32_t kLeastMajor = 1;
constexpr std::uint32_t kLeastMinor = 13;

Status unsupported(std::string text) {
  return {StatusCode::kUnsupported, std::move(text)};
}

Status load(const std::string& file, UcxLibrary& ucx) {
  void* library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);  // kept for the life of the process
  if (library == nullptr) return not_found(std::string("no UCX: ") + ::dlerror());
#define EPD_UCX_LOAD(name)                                                  \
  ucx.name = reinterpret_cast<decltype(ucx.name)>(::dlsym(library, #name)); \
  if (ucx.name == nullptr) return unsupported(file + " has no function " #name);
  EPD_UCX_LOAD(ucp_get_version)  // it decides which others there should be
  EPD_UCX_LOAD(ucp_get_version_string)
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  ucx.ucp_get_version(&major, &minor, &release);
  if (major != kLeastMajor || minor < kLeastMinor) {
    return {StatusCode::kVersionMismatch, file + " is UCX " + ucx.ucp_get_version_string() +
                                              "; needed: " + std::to_string(kLeastMajor) + "." +
                                              std::to_string(kLeastMinor) + " or a later 1.x"};
  }
  EPD_UCX_FUNCTIONS(EPD_UCX_LOAD)
#undef EPD_UCX_LOAD
  ucx.major = major;
  ucx.minor = minor;
  ucx.release = release;
  return {};
}

}  // namespace

std::string UcxLibrary::describe(const char* what, ucs_status_t status) const {
  return std::string(what) + ": " + ucs_status_string(status);
}

Result<const UcxLibrary*> ucx_library(const std::string& file) {
  static std::mutex mutex;
  static std::string loaded_file;             // guarded by mutex
  static const UcxLibrary* loaded = nullptr;  // likewise
  const std::lock_guard lock(mutex);
  if (loaded != nullptr) {
    if (file == loaded_file) return loaded;
    return invalid_argument("UCX library is " + file + "; this process has loaded " + loaded_file);
  }
  static UcxLibrary library;
  if (Status status = load(file, library); !status.ok()) return status;
  loaded_file = file;
  loaded = &library;
  return loaded;
}

}  // namespace epd::transport
