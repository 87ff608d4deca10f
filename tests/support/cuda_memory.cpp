#include "support/cuda_memory.h"

#include "support/ranks.h"

#include <dlfcn.h>
#include <atomic>
#include <string>
#include <thread>

namespace epd::test {
namespace {

// cuda.h's, as far as they are filled in here.
struct Location {
  int type = 1;  // a device
  int id = 0;
};
struct AllocationProperties {
  int type = 1;     // pinned
  int handles = 1;  // POSIX file descriptors
  Location location;
  void* win32 = nullptr;
  unsigned char flags[8] = {};
};
struct Access {
  Location location;
  int flags = 3;  // reading and writing
};

// The driver's functions that a copy needs, declared by hand: this is built without its header too.
struct Driver {
  using Address = unsigned long long;
  int (*init)(unsigned int) = nullptr;
  int (*retain)(void**, int) = nullptr;
  int (*set_current)(void*) = nullptr;
  int (*synchronize)() = nullptr;
  int (*to_device)(Address, const void*, std::size_t) = nullptr;
  int (*from_device)(void*, Address, std::size_t) = nullptr;
  int (*pinned)(void**, std::size_t, unsigned int) = nullptr;
  int (*make_stream)(void**, unsigned int) = nullptr;
  int (*destroy_stream)(void*) = nullptr;
  int (*query)(void*) = nullptr;
  int (*copy_in)(Address, const void*, std::size_t, void*) = nullptr;
  int (*copy_out)(void*, Address, std::size_t, void*) = nullptr;
  int (*copy)(Address, Address, std::size_t, void*) = nullptr;
  int (*wait)(void*, Address, std::uint32_t, unsigned int) = nullptr;
  int (*make_event)(void**, unsigned int) = nullptr;
  int (*destroy_event)(void*) = nullptr;
  int (*record)(void*, void*) = nullptr;
  int (*wait_event)(void*, void*, unsigned int) = nullptr;
  int (*fill)(Address, unsigned char, std::size_t, void*) = nullptr;
  int (*stream_synchronize)(void*) = nullptr;
  int (*allocate)(Address*, std::size_t) = nullptr;
  int (*free)(Address) = nullptr;
  int (*load)(void**, const void*, void*, void*, unsigned int, void*, void*, unsigned int) = nullptr;
  int (*kernel)(void**, void*, const char*) = nullptr;
  int (*launch)(void*, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
                unsigned int, void*, void**, void**) = nullptr;
  int (*begin_capture)(void*, int) = nullptr;
  int (*end_capture)(void*, void**) = nullptr;
  int (*instantiate)(void**, void*, unsigned long long) = nullptr;
  int (*launch_graph)(void*, void*) = nullptr;
  int (*destroy_executable)(void*) = nullptr;
  int (*destroy_graph)(void*) = nullptr;
  int (*unit)(std::size_t*, const AllocationProperties*, int) = nullptr;
  int (*create)(unsigned long long*, std::size_t, const AllocationProperties*, unsigned long long) = nullptr;
  int (*export_fd)(void*, unsigned long long, int, unsigned long long) = nullptr;
  int (*release)(unsigned long long) = nullptr;
  int (*reserve)(Address*, std::size_t, std::size_t, Address, unsigned long long) = nullptr;
  int (*map)(Address, std::size_t, std::size_t, unsigned long long, unsigned long long) = nullptr;
  int (*allow)(Address, std::size_t, const Access*, std::size_t) = nullptr;
  int (*unmap)(Address, std::size_t) = nullptr;
  int (*free_reserved)(Address, std::size_t) = nullptr;

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
    find(pinned, "cuMemHostAlloc");
    find(make_stream, "cuStreamCreate");
    find(destroy_stream, "cuStreamDestroy_v2");
    find(query, "cuStreamQuery");
    find(copy_in, "cuMemcpyHtoDAsync_v2");
    find(copy_out, "cuMemcpyDtoHAsync_v2");
    find(copy, "cuMemcpyDtoDAsync_v2");
    find(wait, "cuStreamWaitValue32_v2");
    find(make_event, "cuEventCreate");
    find(destroy_event, "cuEventDestroy_v2");
    find(record, "cuEventRecord");
    find(wait_event, "cuStreamWaitEvent");
    find(fill, "cuMemsetD8Async");
    find(stream_synchronize, "cuStreamSynchronize");
    find(allocate, "cuMemAlloc_v2");
    find(free, "cuMemFree_v2");
    find(load, "cuLibraryLoadData");
    find(kernel, "cuLibraryGetKernel");
    find(launch, "cuLaunchKernel");
    find(begin_capture, "cuStreamBeginCapture_v2");
    find(end_capture, "cuStreamEndCapture");
    find(instantiate, "cuGraphInstantiateWithFlags");
    find(launch_graph, "cuGraphLaunch");
    find(destroy_executable, "cuGraphExecDestroy");
    find(destroy_graph, "cuGraphDestroy");
    find(unit, "cuMemGetAllocationGranularity");
    find(create, "cuMemCreate");
    find(export_fd, "cuMemExportToShareableHandle");
    find(release, "cuMemRelease");
    find(reserve, "cuMemAddressReserve");
    find(map, "cuMemMap");
    find(allow, "cuMemSetAccess");
    find(unmap, "cuMemUnmap");
    find(free_reserved, "cuMemAddressFree");
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
  // The copy returns when it has read the host's memory. Not all of the context: its streams may wait.
  check(driver().stream_synchronize(nullptr), "cuStreamSynchronize");
}

void copy_from_gpu(int gpu, void* to, const void* from, std::size_t bytes) {
  driver().use(gpu);
  check(driver().from_device(to, reinterpret_cast<Driver::Address>(from), bytes), "cuMemcpyDtoH");
}

GpuAllocation allocate_on_gpu(int gpu, std::size_t bytes) {
  driver().use(gpu);
  AllocationProperties properties;
  properties.location.id = gpu;
  std::size_t unit = 0;
  check(driver().unit(&unit, &properties, 0), "cuMemGetAllocationGranularity");
  GpuAllocation made;
  made.bytes = (bytes + unit - 1) / unit * unit;
  unsigned long long handle = 0;
  check(driver().create(&handle, made.bytes, &properties, 0), "cuMemCreate");
  check(driver().export_fd(&made.fd, handle, 1, 0), "cuMemExportToShareableHandle");
  Driver::Address address = 0;
  check(driver().reserve(&address, made.bytes, 0, 0, 0), "cuMemAddressReserve");
  check(driver().map(address, made.bytes, 0, handle, 0), "cuMemMap");
  check(driver().release(handle), "cuMemRelease");  // the mapping keeps it
  Access access;
  access.location.id = gpu;
  check(driver().allow(address, made.bytes, &access, 1), "cuMemSetAccess");
  made.address = reinterpret_cast<std::byte*>(address);
  return made;
}

namespace {

// cuda.h's
constexpr unsigned int kPortableAndMapped = 1 | 2;
constexpr unsigned int kNonBlocking = 1;
constexpr unsigned int kGreaterOrEqual = 0;
constexpr int kNotReady = 600;

Driver::Address address(const void* pointer) {
  return reinterpret_cast<Driver::Address>(pointer);
}

}  // namespace

PiecedMemory::PiecedMemory(int gpu, std::size_t bytes) : gpu_(gpu) {
  driver().use(gpu_);
  AllocationProperties properties;
  properties.location.id = gpu_;
  check(driver().unit(&unit_, &properties, 0), "cuMemGetAllocationGranularity");
  pieces_ = (bytes + unit_ - 1) / unit_;
  Driver::Address at = 0;
  check(driver().reserve(&at, pieces_ * unit_, 0, 0, 0), "cuMemAddressReserve");
  begin_ = reinterpret_cast<std::byte*>(at);  // NOLINT(performance-no-int-to-ptr)
  map();
}

PiecedMemory::~PiecedMemory() {
  driver().use(gpu_);
  unmap();
  driver().free_reserved(address(begin_), pieces_ * unit_);
}

void PiecedMemory::renew() {
  driver().use(gpu_);
  unmap();
  map();
}

void PiecedMemory::map() {
  AllocationProperties properties;
  properties.location.id = gpu_;
  Access access;
  access.location.id = gpu_;
  for (std::size_t i = 0; i < pieces_; ++i) {
    unsigned long long handle = 0;
    check(driver().create(&handle, unit_, &properties, 0), "cuMemCreate");
    check(driver().map(address(begin_ + i * unit_), unit_, 0, handle, 0), "cuMemMap");
    check(driver().release(handle), "cuMemRelease");
  }
  check(driver().allow(address(begin_), pieces_ * unit_, &access, 1), "cuMemSetAccess");
}

void PiecedMemory::unmap() {
  for (std::size_t i = 0; i < pieces_; ++i) driver().unmap(address(begin_ + i * unit_), unit_);
}

std::byte* malloc_on_gpu(int gpu, std::size_t bytes) {
  driver().use(gpu);
  Driver::Address address = 0;
  check(driver().allocate(&address, bytes), "cuMemAlloc");
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
}

void free_on_gpu(int gpu, std::byte* address) {
  driver().use(gpu);
  check(driver().free(reinterpret_cast<std::uintptr_t>(address)), "cuMemFree");
}

std::byte* pinned_memory(int gpu, std::size_t bytes) {
  driver().use(gpu);
  void* memory = nullptr;
  check(driver().pinned(&memory, bytes, kPortableAndMapped), "cuMemHostAlloc");
  return static_cast<std::byte*>(memory);
}

namespace {

// One thread that looks at the clock for a time in nanoseconds. Compiled by the driver.
constexpr char kSpinKernel[] = R"PTX(
.version 8.0
.target sm_80
.address_size 64
.visible .entry epd_test_spin(.param .u64 time)
{
  .reg .u64 %rd<4>;
  .reg .pred %p;
  ld.param.u64 %rd0, [time];
  mov.u64 %rd1, %globaltimer;
again:
  mov.u64 %rd2, %globaltimer;
  sub.u64 %rd3, %rd2, %rd1;
  setp.lt.u64 %p, %rd3, %rd0;
  @%p bra again;
  ret;
}
)PTX";

bool spin_for(int seconds, void* stream) {
  void* library = nullptr;
  void* kernel = nullptr;
  std::uint64_t time_ns = static_cast<std::uint64_t>(seconds) * 1'000'000'000;
  void* arguments[] = {&time_ns};
  return driver().load(&library, kSpinKernel, nullptr, nullptr, 0, nullptr, nullptr, 0) == 0 &&
         driver().kernel(&kernel, library, "epd_test_spin") == 0 &&
         driver().launch(kernel, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr) == 0;
}

// Two streams, so that one has work while the other is waited for.
void fill_for(int seconds, int gpu) {
  constexpr std::size_t kBytes = 16 << 20;
  driver().use(gpu);
  Driver::Address memory = 0;
  check(driver().allocate(&memory, kBytes), "cuMemAlloc");
  void* streams[2] = {};
  for (void*& stream : streams) check(driver().make_stream(&stream, kNonBlocking), "cuStreamCreate");
  const double end = now_s() + seconds;
  for (std::uint32_t turn = 0; now_s() < end; ++turn) {
    for (int i = 0; i < 16; ++i) driver().fill(memory, 1, kBytes, streams[turn % 2]);
    driver().stream_synchronize(streams[1 - turn % 2]);
  }
}

}  // namespace

std::string occupy_gpu(int gpu, int seconds) {
  driver().use(gpu);
  void* stream = nullptr;
  check(driver().make_stream(&stream, kNonBlocking), "cuStreamCreate");
  if (spin_for(seconds, stream)) return "one long kernel";
  std::thread([gpu, seconds] { fill_for(seconds, gpu); }).detach();  // the fake driver knows no such kernel
  return "fills, one after another";
}

GpuStream::GpuStream(int gpu) : gpu_(gpu) {
  gate_ = reinterpret_cast<std::uint32_t*>(pinned_memory(gpu, sizeof(*gate_)));
  *gate_ = 1;
  check(driver().make_stream(&stream_, kNonBlocking), "cuStreamCreate");
}

GpuStream::~GpuStream() {
  unblock();
  driver().destroy_stream(stream_);
}

void GpuStream::copy_in(void* to, const void* from, std::size_t bytes) const {
  driver().use(gpu_);
  check(driver().copy_in(address(to), from, bytes, stream_), "cuMemcpyHtoDAsync");
}

void GpuStream::copy_out(void* to, const void* from, std::size_t bytes) const {
  driver().use(gpu_);
  check(driver().copy_out(to, address(from), bytes, stream_), "cuMemcpyDtoHAsync");
}

void GpuStream::copy(void* to, const void* from, std::size_t bytes) const {
  driver().use(gpu_);
  check(driver().copy(address(to), address(from), bytes, stream_), "cuMemcpyDtoDAsync");
}

void GpuStream::wait_event(void* event) const {
  driver().use(gpu_);
  check(driver().wait_event(stream_, event, 0), "cuStreamWaitEvent");
}

void GpuStream::wait_for(const GpuStream& other) const {
  constexpr unsigned int kDisableTiming = 2;
  void* event = nullptr;
  driver().use(gpu_);
  check(driver().make_event(&event, kDisableTiming), "cuEventCreate");
  check(driver().record(event, other.stream_), "cuEventRecord");
  wait_event(event);
  check(driver().destroy_event(event), "cuEventDestroy");
}

GpuGraph::~GpuGraph() {
  if (executable_ != nullptr) driver().destroy_executable(executable_);
}

void GpuStream::begin_capture() const {
  constexpr int kGlobal = 0;
  driver().use(gpu_);
  check(driver().begin_capture(stream_, kGlobal), "cuStreamBeginCapture");
}

GpuGraph GpuStream::end_capture() const {
  void* graph = nullptr;
  void* executable = nullptr;
  check(driver().end_capture(stream_, &graph), "cuStreamEndCapture");
  check(driver().instantiate(&executable, graph, 0), "cuGraphInstantiate");
  check(driver().destroy_graph(graph), "cuGraphDestroy");
  return GpuGraph(executable);
}

void GpuStream::launch(const GpuGraph& graph) const {
  driver().use(gpu_);
  check(driver().launch_graph(graph.get(), stream_), "cuGraphLaunch");
}

void GpuStream::hold() {
  driver().use(gpu_);
  std::atomic_ref(*gate_).store(0);
  check(driver().wait(stream_, address(gate_), 1, kGreaterOrEqual), "cuStreamWaitValue32");
}

void GpuStream::unblock() const {
  std::atomic_ref(*gate_).store(1);
}

bool GpuStream::idle() const {
  driver().use(gpu_);
  const int result = driver().query(stream_);
  if (result != kNotReady) check(result, "cuStreamQuery");
  return result != kNotReady;
}

bool GpuStream::finish(double seconds) const {
  return eventually(seconds, [this] { return idle(); });
}

}  // namespace epd::test
