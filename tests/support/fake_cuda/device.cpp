// cuInit and cuDevice*: settings, and what a device says of itself.
#include "fake_cuda/driver.h"
#include "fake_cuda/watching.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <optional>
#include <set>
#include <sstream>

namespace epd::fake_cuda {
namespace {

constexpr std::size_t kMemoryBytes = std::size_t{141} << 30;

std::atomic<Driver*> the_driver{nullptr};

std::string environment(const char* name, const char* otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

// "2,3": as far as it makes sense.
std::vector<int> visible_devices(int count) {
  std::vector<int> devices;
  const char* const list = std::getenv("CUDA_VISIBLE_DEVICES");
  for (int i = 0; list == nullptr && i < count; ++i) devices.push_back(i);
  std::istringstream items(list == nullptr ? "" : list);
  for (std::string item; std::getline(items, item, ',');) {
    char* end = nullptr;
    const long number = std::strtol(item.c_str(), &end, 10);
    if (item.empty() || *end != '\0' || number < 0 || number >= count) break;
    devices.push_back(static_cast<int>(number));
  }
  return devices;
}

bool allocates(const std::string& function) {
  return function == "cuMemCreate" || function == "cuMemAlloc" || function == "cuMemHostAlloc" ||
         function == "cuMemAddressReserve";
}

// "0-1,2-3"
std::vector<std::pair<int, int>> parse_pairs(const std::string& list) {
  std::vector<std::pair<int, int>> pairs;
  std::istringstream items(list);
  for (std::string item; std::getline(items, item, ',');) {
    const std::size_t dash = item.find('-');
    if (dash != std::string::npos)
      pairs.emplace_back(std::atoi(item.c_str()), std::atoi(item.c_str() + dash + 1));
  }
  return pairs;
}

// "function:n[:error][@device]"; the device may be "none".
Fault parse_fault(std::string item) {
  Fault fault;
  if (const std::size_t at = item.find('@'); at != std::string::npos) {
    const std::string device = item.substr(at + 1);
    fault.device = device == "none" ? Fault::kWithoutContext : std::atoi(device.c_str());
    item.resize(at);
  }
  std::istringstream parts(item);
  std::string call;
  std::string error;
  std::getline(parts, fault.function, ':');
  std::getline(parts, call, ':');
  std::getline(parts, error, ':');
  fault.call = std::strtoull(call.c_str(), nullptr, 10);
  fault.error = !error.empty()              ? static_cast<CUresult>(std::atoi(error.c_str()))
                : allocates(fault.function) ? CUDA_ERROR_OUT_OF_MEMORY
                                            : CUDA_ERROR_ILLEGAL_ADDRESS;
  return fault;
}

// Several with commas between.
std::vector<Fault> parse_faults(const std::string& list) {
  std::vector<Fault> faults;
  std::istringstream items(list);
  for (std::string item; std::getline(items, item, ',');) faults.push_back(parse_fault(item));
  return faults;
}

// Errors that end a context.
bool is_sticky(CUresult error) {
  return error == CUDA_ERROR_ILLEGAL_ADDRESS || error == CUDA_ERROR_LAUNCH_FAILED ||
         error == CUDA_ERROR_ECC_UNCORRECTABLE || error == CUDA_ERROR_LAUNCH_TIMEOUT ||
         error == CUDA_ERROR_HARDWARE_STACK_ERROR || error == CUDA_ERROR_ILLEGAL_INSTRUCTION;
}

bool is_meant(const Fault& fault, const char* function, const Context* context) {
  if (fault.function != function) return false;
  if (fault.device == Fault::kAnyDevice) return true;
  return (context == nullptr ? Fault::kWithoutContext : context->device.machine) == fault.device;
}

// Takes the file's fault: the process that renames the file fails its call. Another file may have its name by
// then; that one goes back.
bool take_away(const std::string& path, ino_t inode) {
  const std::string taken = path + "-taken-" + std::to_string(::getpid());
  if (::rename(path.c_str(), taken.c_str()) != 0) return false;
  struct stat it {};
  const bool same = ::stat(taken.c_str(), &it) == 0 && it.st_ino == inode;
  same ? ::unlink(taken.c_str()) : ::rename(taken.c_str(), path.c_str());
  return same;
}

CUresult inject_once(Driver& all, const char* function, const Context* context) {
  FaultFile& file = all.fault_file;
  if (file.path.empty()) return CUDA_SUCCESS;
  const int fd = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return CUDA_SUCCESS;
  struct stat it {};
  char text[256] = "";
  const bool read = ::fstat(fd, &it) == 0 && ::read(fd, text, sizeof(text) - 1) > 0;
  ::close(fd);
  if (!read) return CUDA_SUCCESS;
  const Fault fault = parse_fault(text);
  if (!is_meant(fault, function, context)) return CUDA_SUCCESS;
  const std::lock_guard lock(all.mutex);
  const std::int64_t written_ns = it.st_mtim.tv_sec * 1'000'000'000 + it.st_mtim.tv_nsec;
  if (file.inode != it.st_ino || file.written_ns != written_ns) {
    file.inode = it.st_ino;
    file.written_ns = written_ns;
    file.calls = 0;
  }
  if (++file.calls != fault.call) return CUDA_SUCCESS;
  return take_away(file.path, it.st_ino) ? fault.error : CUDA_SUCCESS;
}

CUresult inject(Driver& all, const char* function, const Context* context) {
  if (const CUresult error = inject_once(all, function, context)) return error;
  if (all.settings.faults.empty()) return CUDA_SUCCESS;
  const std::lock_guard lock(all.mutex);
  CUresult result = CUDA_SUCCESS;
  for (Fault& fault : all.settings.faults) {
    if (is_meant(fault, function, context) && ++fault.calls == fault.call) result = fault.error;
  }
  return result;
}

CUresult initialise() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (Driver* const all = the_driver.load()) {
    return all->process == ::getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
  }
  auto all = std::make_unique<Driver>();
  all->settings = Settings::from_environment();
  all->process = ::getpid();
  if (all->settings.devices.empty()) return CUDA_ERROR_NO_DEVICE;
  for (const int machine : all->settings.devices) {
    auto device = std::make_unique<Device>();
    device->ordinal = static_cast<int>(all->devices.size());
    device->machine = machine;
    const auto file = [&](const char* what) {
      const std::string& dir = all->settings.fault_dir;
      return dir.empty() ? "" : dir + "/" + what + "-" + std::to_string(machine);
    };
    device->fault_file = file("device");
    device->busy_file = file("busy");
    device->stuck_file = file("stuck");
    device->held_file = file("held");
    device->taken_file = file("taken");
    all->devices.push_back(std::move(device));
  }
  if (!all->settings.fault_dir.empty()) all->fault_file.path = all->settings.fault_dir + "/fail";
  all->primaries.resize(all->devices.size());
  the_driver.store(all.release());
  return CUDA_SUCCESS;
}

// The text of a file of the folder of faults. None: it is not there.
std::optional<std::string> read_file(const std::string& path) {
  const int fd = path.empty() ? -1 : ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  char text[256];
  const ssize_t bytes = ::read(fd, text, sizeof(text));
  ::close(fd);
  return std::string(text, bytes < 0 ? 0 : static_cast<std::size_t>(bytes));
}

int attribute(const Driver& all, const Device& device, CUdevice_attribute which) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return kNumSms;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return all.settings.shared_memory;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 233472;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: return 1024;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 1 << 20;  // flushing it is quick
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return 0x10 + device.machine;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_MPS_ENABLED: return all.settings.mps ? 1 : 0;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      return all.settings.host_numa ? 1 : 0;
    default: return 0;
  }
}

CUresult get_uuid(CUuuid* uuid, CUdevice ordinal) {
  if (const CUresult error = enter("cuDeviceGetUuid", Needs::kNothing)) return error;
  const Device* const device = driver()->device(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(uuid->bytes, "\xfa\x4eGPU of no ker", 15);
  uuid->bytes[15] = static_cast<char>(device->machine + 1);
  return CUDA_SUCCESS;
}

}  // namespace

Settings Settings::from_environment() {
  Settings settings;
  settings.devices = visible_devices(std::atoi(environment("EPD_FAKE_CUDA_DEVICES", "4").c_str()));
  settings.mps = environment("EPD_FAKE_CUDA_MPS", "1") != "0";
  settings.host_numa = environment("EPD_FAKE_CUDA_HOST_NUMA", "1") != "0";
  settings.shared_memory = std::atoi(environment("EPD_FAKE_CUDA_SHARED_MEMORY", "232448").c_str());
  settings.fault_dir = environment("EPD_FAKE_CUDA_FAULT_DIR", "");
  settings.apart = parse_pairs(environment("EPD_FAKE_CUDA_NO_PEER", ""));
  settings.faults = parse_faults(environment("EPD_FAKE_CUDA_FAIL", ""));
  return settings;
}

Driver* driver() {
  return the_driver.load();
}

CUresult Device::check() {
  const CUresult known = error.load();
  if (known != CUDA_SUCCESS || fault_file.empty() || ::access(fault_file.c_str(), F_OK) != 0) return known;
  if (contexts.load() != 0) fail(CUDA_ERROR_ILLEGAL_ADDRESS);
  return error.load();
}

bool Device::begins(const std::string& kernel) const {
  const std::optional<std::string> stuck = read_file(stuck_file);
  if (!stuck.has_value()) return true;
  std::istringstream words(*stuck);
  const std::set<std::string> names{std::istream_iterator<std::string>(words), {}};
  return !names.empty() && !names.contains(kernel);
}

bool Device::writes_words() const {
  return held_file.empty() || ::access(held_file.c_str(), F_OK) != 0;
}

bool Device::take_sms(const StayingKernel& kernel) {
  unsigned sms = kernel.ctas;
  if (const std::optional<std::string> taken = read_file(taken_file); taken.has_value()) {
    unsigned others = kNumSms;  // the file is being written, or says nothing
    std::istringstream(*taken) >> others;
    sms += others;
  }
  const std::lock_guard lock(staying_mutex);
  for (const StayingKernel& other : staying) sms += other.ctas;
  if (sms > kNumSms) return false;
  staying.push_back(kernel);
  return true;
}

void Device::give_sms(const StayingKernel& kernel) {
  const std::lock_guard lock(staying_mutex);
  staying.erase(std::find(staying.begin(), staying.end(), kernel));
}

CUresult Device::admit() const {
  const bool busy = !busy_file.empty() && ::access(busy_file.c_str(), F_OK) == 0;
  return busy && contexts.load() == 0 ? CUDA_ERROR_MPS_SERVER_NOT_READY : CUDA_SUCCESS;
}

bool can_reach(CUdevice device, CUdevice peer) {
  const int a = driver()->device(device)->machine;
  const int b = driver()->device(peer)->machine;
  const auto& apart = driver()->settings.apart;
  return std::none_of(apart.begin(), apart.end(),
                      [&](const auto& pair) { return pair == std::pair(a, b) || pair == std::pair(b, a); });
}

void Device::fail(CUresult result) {
  CUresult none = CUDA_SUCCESS;
  if (error.compare_exchange_strong(none, result)) ++driver()->faults;
}

CUresult enter(const char* function, Needs needs) {
  Driver* const all = driver();
  if (all == nullptr || all->process != ::getpid()) return CUDA_ERROR_NOT_INITIALIZED;
  if (Watcher* const sees = watcher()) {
    if (const CUresult given = sees->calls(function)) return given;
  }
  const std::shared_ptr<Context> context = current_context();
  const CUresult injected = inject(*all, function, context.get());
  if (is_sticky(injected) && context != nullptr) context->device.fail(injected);
  if (injected != CUDA_SUCCESS) return injected;
  if (needs == Needs::kNothing) return CUDA_SUCCESS;
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return context->device.check();
}

void complain(const std::string& text) {
  std::fprintf(stderr, "fake cuda [%d]: %s\n", ::getpid(), text.c_str());
}

}  // namespace epd::fake_cuda

using epd::fake_cuda::driver;
using epd::fake_cuda::enter;
using epd::fake_cuda::Needs;

CUresult CUDAAPI cuInit(unsigned int flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (epd::fake_cuda::Watcher* const sees = epd::fake_cuda::watcher()) {
    if (const CUresult given = sees->calls("cuInit")) return given;
  }
  if (const CUresult error = epd::fake_cuda::initialise()) return error;
  return epd::fake_cuda::inject(*driver(), "cuInit", nullptr);
}

CUresult CUDAAPI cuDriverGetVersion(int* version) {
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
  if (const CUresult error = enter("cuDeviceGetCount", Needs::kNothing)) return error;
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = static_cast<int>(driver()->devices.size());
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  if (const CUresult error = enter("cuDeviceGet", Needs::kNothing)) return error;
  if (driver()->device(ordinal) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetName(char* name, int len, CUdevice device) {
  if (const CUresult error = enter("cuDeviceGetName", Needs::kNothing)) return error;
  if (driver()->device(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (name == nullptr || len <= 0) return CUDA_ERROR_INVALID_VALUE;
  std::snprintf(name, static_cast<std::size_t>(len), "NVIDIA H200 (fake)");
  return CUDA_SUCCESS;
}

// cuDeviceGetUuid is cuDeviceGetUuid_v2 since CUDA 13; the old name is still in the library.
CUresult CUDAAPI cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  return epd::fake_cuda::get_uuid(uuid, device);
}
#undef cuDeviceGetUuid
extern "C" __attribute__((visibility("default"))) CUresult CUDAAPI cuDeviceGetUuid(CUuuid* uuid,
                                                                                   CUdevice device) {
  return epd::fake_cuda::get_uuid(uuid, device);
}

CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
  if (const CUresult error = enter("cuDeviceGetAttribute", Needs::kNothing)) return error;
  if (driver()->device(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (value == nullptr || which <= 0 || which >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
  *value = epd::fake_cuda::attribute(*driver(), *driver()->device(device), which);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  if (const CUresult error = enter("cuDeviceCanAccessPeer", Needs::kNothing)) return error;
  if (driver()->device(device) == nullptr || driver()->device(peer) == nullptr)
    return CUDA_ERROR_INVALID_DEVICE;
  if (can == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *can = device != peer && epd::fake_cuda::can_reach(device, peer) ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceTotalMem(std::size_t* bytes, CUdevice device) {
  if (const CUresult error = enter("cuDeviceTotalMem", Needs::kNothing)) return error;
  if (driver()->device(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *bytes = epd::fake_cuda::kMemoryBytes;
  return CUDA_SUCCESS;
}
