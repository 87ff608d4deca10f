// Memory of cudaMalloc between processes, and what is known of an address.
#include "fake_cuda/memory.h"
#include "fake_cuda/stream.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>

using namespace epd::fake_cuda;

namespace {

constexpr char kMagic[8] = {'e', 'p', 'd', 'f', 'a', 'k', 'e', '\0'};

// The contents of a handle: which descriptor of which process has the memory.
struct IpcHandle {
  char magic[8];
  std::int32_t pid;
  std::int32_t fd;
  std::uint64_t inode;
  std::uint64_t bytes;
  std::int32_t machine;  // the device, as the machine numbers it
  std::uint64_t address;
};
static_assert(sizeof(IpcHandle) <= sizeof(CUipcMemHandle));

struct Opened {
  CUdeviceptr address = 0;
  int times = 0;
};
using Key = std::tuple<std::int32_t, std::uint64_t>;  // process, address there

std::mutex& opened_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}
// As the true driver, it opens an allocation once in a process. A new allocation at an address whose former
// allocation is still open counts as the same here. Nothing is known of the true one that rules this out.
std::map<Key, Opened>& opened() {
  static auto* const all = new std::map<Key, Opened>;
  return *all;
}

int ordinal_of(int machine) {
  for (const auto& device : driver()->devices) {
    if (device->machine == machine) return device->ordinal;
  }
  return 0;
}

CUresult answer(CUpointer_attribute attribute, void* to, const Known& known) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: std::memcpy(to, &known.id, sizeof(known.id)); return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      std::memcpy(to, &known.begin, sizeof(known.begin));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      std::memcpy(to, &known.bytes, sizeof(known.bytes));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      std::memcpy(to, &known.home, sizeof(known.home));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: {
      const unsigned long long types = known.by_descriptor ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0;
      std::memcpy(to, &types, sizeof(types));
      return CUDA_SUCCESS;
    }
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // namespace

// An unknown address has no attributes, and is no error.
CUresult CUDAAPI cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes, void** data,
                                        CUdeviceptr address) {
  if (const CUresult error = enter("cuPointerGetAttributes", Needs::kContext)) return error;
  if (count == 0 || attributes == nullptr || data == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Known known = memory().look_up(address);
  for (unsigned int i = 0; i < count; ++i) {
    if (const CUresult error = answer(attributes[i], data[i], known)) return error;
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle* out, CUdeviceptr address) {
  if (const CUresult error = enter("cuIpcGetMemHandle", Needs::kContext)) return error;
  const Known known = memory().look_up(address);
  struct stat info {};
  if (out == nullptr || known.fd < 0 || ::fstat(known.fd, &info) != 0) return CUDA_ERROR_INVALID_VALUE;
  IpcHandle handle{};
  std::memcpy(handle.magic, kMagic, sizeof(kMagic));
  handle.pid = ::getpid();
  handle.fd = known.fd;
  handle.inode = info.st_ino;
  handle.bytes = known.bytes;
  handle.machine = driver()->device(known.home)->machine;
  handle.address = known.begin;
  std::memset(out, 0, sizeof(*out));
  std::memcpy(out, &handle, sizeof(handle));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle given, unsigned int flags) {
  if (const CUresult error = enter("cuIpcOpenMemHandle", Needs::kContext)) return error;
  IpcHandle handle{};
  std::memcpy(&handle, &given, sizeof(handle));
  if (address == nullptr || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS ||
      std::memcmp(handle.magic, kMagic, sizeof(kMagic)) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  if (handle.pid == ::getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  const std::lock_guard lock(opened_mutex());
  Opened& known = opened()[{handle.pid, handle.address}];
  if (known.times == 0) {
    char path[64];
    std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle.pid, handle.fd);
    const int fd = ::open(path, O_RDWR | O_CLOEXEC);
    struct stat info {};
    const bool right = fd >= 0 && ::fstat(fd, &info) == 0 && info.st_ino == handle.inode;
    const CUresult error =
        right ? memory().open(fd, static_cast<std::size_t>(info.st_size), ordinal_of(handle.machine),
                              current_context()->device.ordinal, known.address)
              : CUDA_ERROR_INVALID_VALUE;
    if (error != CUDA_SUCCESS) {
      if (fd >= 0) ::close(fd);
      return error;
    }
  }
  ++known.times;
  *address = known.address;
  return CUDA_SUCCESS;
}

// As the true one, this waits for everything that the device still has to do.
CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr address) {
  if (const CUresult error = enter("cuIpcCloseMemHandle", Needs::kContext)) return error;
  if (const CUresult error = synchronise_context(*current_context())) return error;
  const std::lock_guard lock(opened_mutex());
  for (auto& [key, known] : opened()) {
    if (known.times == 0 || known.address != address) continue;
    if (--known.times != 0) return CUDA_SUCCESS;
    return memory().free(pointer(address), RangeKind::kOpened);
  }
  return CUDA_ERROR_INVALID_VALUE;
}
