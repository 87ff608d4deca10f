#include "watched_cuda.h"

#include "fake_cuda/word_step.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>
#include <utility>

namespace epd::testing {

namespace {

constexpr std::uint64_t kHour_ns = 3'600'000'000'000;

void must(CUresult error, const char* what) {
  if (error == CUDA_SUCCESS) return;
  std::fprintf(stderr, "%s: %d\n", what, static_cast<int>(error));
  std::abort();
}
#define EPD_MUST(call) must(call, #call)

// Kernels are called as profilers call them. Their names end with their library.
const char* kept(const char* name) {
  static std::set<std::string> names;
  static std::mutex mutex;
  for (std::uint32_t i = 0; i < stream_kernels::kNumKernels; ++i) {
    if (std::strcmp(name, stream_kernels::kKernelNames[i]) == 0) return stream_kernels::kKernelTitles[i];
  }
  const std::lock_guard lock(mutex);
  return names.emplace(name).first->c_str();
}

bool is(const char* text, const char* other) {
  return std::strcmp(text, other) == 0;
}

}  // namespace

WatchedCuda::WatchedCuda() {
  EPD_MUST(cuInit(0));
  EPD_MUST(cuDevicePrimaryCtxRetain(&context_, kDevice));
  faults_before_ = holdings().faults;
  cuFakeWatch(this);
}

WatchedCuda::~WatchedCuda() {
  cuFakeWatch(nullptr);
  EPD_MUST(cuCtxPushCurrent(context_));
  for (const CUstream stream : made_) cuStreamDestroy(stream);
  for (void* const word : pinned_) cuMemFreeHost(word);
  cuDevicePrimaryCtxRelease(kDevice);
  cuCtxSetCurrent(nullptr);
}

std::array<std::uint8_t, 16> WatchedCuda::uuid() {
  CUuuid uuid{};
  EPD_MUST(cuInit(0));
  EPD_MUST(cuDeviceGetUuid(&uuid, kDevice));
  std::array<std::uint8_t, 16> bytes{};
  std::memcpy(bytes.data(), uuid.bytes, bytes.size());
  return bytes;
}

std::string WatchedCuda::memory_name() {
  return "epd_fake_cuda_device_" + std::to_string(kDevice);
}

CUstream WatchedCuda::make_stream() {
  CUstream stream = nullptr;
  EPD_MUST(cuCtxPushCurrent(context_));
  EPD_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  EPD_MUST(cuCtxPopCurrent(nullptr));
  made_.push_back(stream);
  return stream;
}

void* WatchedCuda::pinned_bytes(std::size_t bytes) {
  void* memory = nullptr;
  EPD_MUST(cuCtxPushCurrent(context_));
  EPD_MUST(cuMemHostAlloc(&memory, bytes, CU_MEMHOSTALLOC_PORTABLE));
  EPD_MUST(cuCtxPopCurrent(nullptr));
  pinned_.push_back(memory);
  return memory;
}

void WatchedCuda::set_current(CUcontext context) {
  EPD_MUST(cuCtxSetCurrent(context));
}
CUcontext WatchedCuda::current() const {
  CUcontext context = nullptr;
  EPD_MUST(cuCtxGetCurrent(&context));
  return context;
}
void WatchedCuda::on_enqueue(std::function<void(CUstream, const StreamOp&)> hook) {
  const std::lock_guard lock(mutex_);
  hook_ = std::move(hook);
}
void WatchedCuda::after_next_copy(std::function<void()> hook) {
  const std::lock_guard lock(mutex_);
  after_copy_ = std::move(hook);
}
void WatchedCuda::before_next(const std::string& function, std::function<void()> hook) {
  const std::lock_guard lock(mutex_);
  before_[function] = std::move(hook);
}
void WatchedCuda::fail(const std::string& function, CUresult error) {
  const std::lock_guard lock(mutex_);
  failures_[function] = error;
}
void WatchedCuda::hold(CUstream stream, bool held) {
  settle();
  cuFakeHold(stream, held);
  settle();
}
void WatchedCuda::poke(std::uintptr_t address, std::uint32_t value) {
  settle();
  std::atomic_ref(*reinterpret_cast<std::uint32_t*>(address)).store(value);
  settle();
}
void WatchedCuda::pass_limits() {
  settle();
  cuFakePassTime(kHour_ns);
  settle();
}

std::vector<StreamOp> WatchedCuda::enqueued(CUstream stream) const {
  const std::lock_guard lock(mutex_);
  const auto found = enqueued_.find(stream);
  return found != enqueued_.end() ? found->second : std::vector<StreamOp>();
}
std::size_t WatchedCuda::enqueued_anywhere() const {
  const std::lock_guard lock(mutex_);
  return num_enqueued_;
}
std::size_t WatchedCuda::launches() const {
  const std::lock_guard lock(mutex_);
  return launches_;
}
std::size_t WatchedCuda::stuck(CUstream stream) const {
  settle();
  return cuFakePending(stream);
}
bool WatchedCuda::await_idle(CUstream stream) const {
  for (int i = 0; i < 10'000; ++i) {
    if (stuck(stream) == 0) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

fake_cuda::Holdings WatchedCuda::holdings() {
  fake_cuda::Holdings holdings;
  cuFakeHoldings(&holdings);
  return holdings;
}
std::size_t WatchedCuda::mapped_bytes() const {
  return holdings().mapped_bytes;
}
int WatchedCuda::retained() const {
  return static_cast<int>(holdings().retained) - 1;
}
int WatchedCuda::synchronized() const {
  const std::lock_guard lock(mutex_);
  return synchronized_;
}
std::vector<std::string> WatchedCuda::mistakes() const {
  const fake_cuda::Holdings left = holdings();
  const std::lock_guard lock(mutex_);
  std::vector<std::string> all = mistakes_;
  if (left.reservations != 0) all.push_back("addresses left reserved");
  if (left.allocations != 0) all.push_back("imported handles left");
  if (left.streams != made_.size() + allowed_streams_) all.push_back("streams left");
  if (left.libraries != 0) all.push_back("libraries left");
  if (left.faults != faults_before_) all.push_back("a device has faulted");
  return all;
}
std::vector<std::string> WatchedCuda::loaded() const {
  const std::lock_guard lock(mutex_);
  return loaded_;
}
bool WatchedCuda::prefers_shared_memory(const std::string& kernel) const {
  const std::lock_guard lock(mutex_);
  const auto found = carveouts_.find(kernel);
  return found != carveouts_.end() && found->second == CU_SHAREDMEM_CARVEOUT_MAX_SHARED;
}

// ---- what the fake driver tells

CUresult WatchedCuda::calls(const char* function) {
  std::function<void()> hook;
  {
    const std::lock_guard lock(mutex_);
    const auto before = before_.find(function);
    if (before != before_.end()) hook = std::exchange(before->second, {});
  }
  if (hook) hook();
  const std::lock_guard lock(mutex_);
  const auto found = failures_.find(kept(function));
  if (found != failures_.end() && found->second != CUDA_SUCCESS) return found->second;
  if (is(function, "cuCtxSynchronize")) ++synchronized_;
  return CUDA_SUCCESS;
}

bool WatchedCuda::is_loading(const fake_cuda::StreamCall& call) {
  const std::lock_guard lock(mutex_);
  const std::string name = kept(call.function);
  const bool known = std::find(loaded_.begin(), loaded_.end(), name) != loaded_.end();
  const auto step = fake_cuda::step_of(call.function, call.parameters);
  const bool loads = !step.calls && step.wait == stream_kernels::Wait::kNothing && step.staging == nullptr;
  if (loads && !known) loaded_.push_back(name);
  if (!loads && !known) mistakes_.push_back(name + " had not been loaded");
  return loads;
}

std::vector<StreamOp> WatchedCuda::ops_of(const fake_cuda::StreamCall& call) {
  const char* const name = kept(call.function);
  if (is(name, "cuStreamIsCapturing")) return {{StreamOp::kCheck, 0, 0}};
  if (is(name, "cuStreamWriteValue32")) return {{StreamOp::kWrite, call.address, call.value}};
  if (is(name, "cuStreamWaitValue32")) {
    const std::lock_guard lock(mutex_);
    if (call.flags != CU_STREAM_WAIT_VALUE_GEQ)
      mistakes_.push_back("a wait that does not compare cyclically");
    return {{StreamOp::kWait, call.address, call.value}};
  }
  if (is_loading(call)) return {};
  const auto step = fake_cuda::step_of(call.function, call.parameters);
  const auto words = reinterpret_cast<std::uintptr_t>(step.words);
  std::vector<StreamOp> ops;
  if (step.copies.num_in != 0) ops.push_back({StreamOp::kCopyIn, 0, step.copies.num_in, name});
  if (step.calls) ops.push_back({StreamOp::kRing, words, 0, name});
  if (step.wait != stream_kernels::Wait::kNothing)
    ops.push_back({StreamOp::kAwait, words, 0, name, step.limit_ns});
  if (step.copies.num_out != 0) ops.push_back({StreamOp::kCopyOut, 0, step.copies.num_out, name});
  return ops;
}

void WatchedCuda::enqueues(const fake_cuda::StreamCall& call) {
  const std::vector<StreamOp> ops = ops_of(call);
  std::function<void(CUstream, const StreamOp&)> hook;
  {
    const std::lock_guard lock(mutex_);
    hook = hook_;
  }
  for (const StreamOp& op : ops) {
    if (hook) hook(call.stream, op);
  }
  const std::lock_guard lock(mutex_);
  if (call.parameters != nullptr) ++launches_;
  for (const StreamOp& op : ops) {
    if (op.kind == StreamOp::kCheck) continue;
    enqueued_[call.stream].push_back(op);
    ++num_enqueued_;
  }
}

void WatchedCuda::has_copied() {
  std::function<void()> hook;
  {
    const std::lock_guard lock(mutex_);
    hook = std::exchange(after_copy_, {});
  }
  if (hook) hook();
}

void WatchedCuda::makes_stream(unsigned flags, int priority) {
  const std::lock_guard lock(mutex_);
  if (flags != CU_STREAM_NON_BLOCKING || priority != -5) mistakes_.push_back("a stream that others hold up");
}

void WatchedCuda::sets_attribute(const char* kernel, CUfunction_attribute which, int value) {
  const std::lock_guard lock(mutex_);
  if (which == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) carveouts_[kept(kernel)] = value;
}

}  // namespace epd::testing
