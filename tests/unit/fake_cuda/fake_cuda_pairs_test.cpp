// What pairs that are enqueued ahead need of the fake driver: waits for a bell, launch attributes, threads
// that sleep until an event, kernels that begin later, SMs that are taken.
#include "fake_cuda/watching.h"
#include "unit/fake_cuda/fake_cuda_call_world.h"
#include "unit/fake_cuda/fake_cuda_cases.h"
#include "unit/fake_cuda/fake_cuda_faults.h"
#include "unit/fake_cuda/fake_cuda_fixture.h"

#include "step.h"

#include <thread>

namespace epd::fake_cuda_test {
namespace {

constexpr std::uint64_t kBell = 0x0000'0001'0000'0001;

class FakeCudaPairs : public FakeCuda {
 protected:
  void SetUp() override {
    FakeCuda::SetUp();
    EPD_CU(cuMemsetD8(memory_, 0, 4096));
    EPD_CU(cuMemAlloc(&rings_, 2 * sizeof(abi::CallWords)));
    EPD_CU(cuMemsetD8(rings_, 0, 2 * sizeof(abi::CallWords)));
    EPD_CU(cuStreamCreate(&other_, CU_STREAM_NON_BLOCKING));
    EPD_CU(cuLibraryLoadData(&library_, "any", nullptr, nullptr, 0, nullptr, nullptr, 0));
  }
  void TearDown() override {
    cuLibraryUnload(library_);
    cuStreamDestroy(other_);
    cuMemFree(rings_);
    FakeCuda::TearDown();
  }
  template <typename Word>
  std::atomic_ref<Word> word(std::size_t offset) {
    return std::atomic_ref(at<Word>(memory_ + offset));
  }
  // A kernel that makes a call. Default: no launch attribute.
  CUresult launch(unsigned ring, std::vector<CUlaunchAttribute> attributes = {}) {
    CUkernel kernel = nullptr;
    EPD_CU(cuLibraryGetKernel(&kernel, library_, stream_kernels::kKernelNames[0]));
    stream_kernels::Step step;
    step.calls = true;
    step.words = &at<abi::CallWords>(rings_) + ring;
    void* parameters[] = {&step};
    const auto count = static_cast<unsigned>(attributes.size());
    const CUlaunchConfig config{1, 1, 1, 1, 1, 1, 0, stream_, attributes.data(), count};
    return cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(kernel), parameters, nullptr);
  }
  std::uint32_t calls(unsigned ring) const {
    return std::atomic_ref((&at<abi::CallWords>(rings_) + ring)->tail);
  }
  static CUlaunchAttribute serialization() {
    CUlaunchAttribute attribute{};
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    return attribute;
  }

  const FaultDir faults_;
  CUdeviceptr rings_ = 0;  // two of abi::CallWords
  CUstream other_ = nullptr;
  CUlibrary library_ = nullptr;
};

template <typename Word>
struct WaitCase {
  unsigned flags;
  Word value;
  Word before;
  Word after;
};

// The highest bit and the lowest one, so that neither half is forgotten.
template <typename Word>
constexpr WaitCase<Word> kWaitCases[] = {
    {CU_STREAM_WAIT_VALUE_GEQ, Word(-2), Word(-3), Word(5)},  // across the wrap
    {CU_STREAM_WAIT_VALUE_GEQ, 1, Word(1) << (sizeof(Word) * 8 - 1) | 1, 1},
    {CU_STREAM_WAIT_VALUE_EQ, 9, 10, 9},
    {CU_STREAM_WAIT_VALUE_AND, Word(kBell) | Word(1) << (sizeof(Word) * 4), 2, 3},
    {CU_STREAM_WAIT_VALUE_AND, Word(kBell) | Word(1) << (sizeof(Word) * 4), 2, Word(1) << (sizeof(Word) * 4)},
    {CU_STREAM_WAIT_VALUE_NOR, Word(-2), 1, 2},
};

TEST_F(FakeCudaPairs, AWaitEndsAsItsFlagsSay) {
  const auto test = [this]<typename Word>(const auto& wait, const WaitCase<Word>& c) {
    SCOPED_TRACE(::testing::Message()
                 << sizeof(Word) << " bytes, flags " << c.flags << ", value " << c.value);
    word<Word>(8).store(c.before);
    EPD_CU(wait(stream_, memory_ + 8, c.value, c.flags));
    cuFakeSettle();
    EXPECT_EQ(cuStreamQuery(stream_), CUDA_ERROR_NOT_READY);
    word<Word>(8).store(c.after);
    EPD_CU(cuStreamSynchronize(stream_));
  };
  for (const auto& c : kWaitCases<std::uint32_t>) test(cuStreamWaitValue32, c);
  for (const auto& c : kWaitCases<std::uint64_t>) test(cuStreamWaitValue64, c);
}

TEST_F(FakeCudaPairs, WaitsOfUnknownFlagsOrUnalignedWordsAreRefused) {
  for (const unsigned flags : {4u, 0x10u, static_cast<unsigned>(CU_STREAM_WAIT_VALUE_FLUSH)}) {
    EXPECT_EQ(cuStreamWaitValue32(stream_, memory_, 0, flags), CUDA_ERROR_INVALID_VALUE) << flags;
    EXPECT_EQ(cuStreamWaitValue64(stream_, memory_, 0, flags), CUDA_ERROR_INVALID_VALUE) << flags;
  }
  EXPECT_EQ(cuStreamWaitValue64(stream_, memory_ + 4, 0, CU_STREAM_WAIT_VALUE_AND), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuStreamWaitValue32(stream_, memory_ + 2, 0, CU_STREAM_WAIT_VALUE_AND), CUDA_ERROR_INVALID_VALUE);
  EPD_CU(cuStreamWaitValue32(stream_, memory_ + 4, 0, CU_STREAM_WAIT_VALUE_EQ));
  EPD_CU(cuStreamSynchronize(stream_));
}

TEST_F(FakeCudaPairs, AKernelOfProgrammaticSerializationBeginsBehindTheOneBefore) {
  CUlaunchAttribute priority{};
  priority.id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
  priority.value.priority = -5;
  EPD_CU(cuStreamWaitValue64(stream_, memory_, kBell, CU_STREAM_WAIT_VALUE_AND));
  EPD_CU(launch(0));
  EPD_CU(launch(1, {serialization(), priority, CUlaunchAttribute{}}));
  cuFakeSettle();
  EXPECT_EQ(calls(1), 0u);
  word<std::uint64_t>(0).store(1);
  EPD_CU(cuStreamSynchronize(stream_));
  EXPECT_EQ(calls(0), 1u);
  EXPECT_EQ(calls(1), 1u);
}

TEST_F(FakeCudaPairs, OtherLaunchAttributesAreRefused) {
  for (const CUlaunchAttributeID id : {CU_LAUNCH_ATTRIBUTE_COOPERATIVE, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                                       CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT}) {
    CUlaunchAttribute other{};
    other.id = id;
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(launch(0, {serialization(), other}), CUDA_ERROR_NOT_SUPPORTED);
    EXPECT_NE(::testing::internal::GetCapturedStderr().find("attribute " + std::to_string(id)),
              std::string::npos);
  }
  EPD_CU(cuStreamSynchronize(stream_));
  EXPECT_EQ(calls(0), 0u);
}

// Each thread enqueues pairs ahead and sleeps until the last one has run; a client rings for each.
TEST_F(FakeCudaPairs, SeveralThreadsEnqueueAheadAndSleep) {
  constexpr unsigned kThreads = 4, kRounds = 8, kPairs = 8;
  FaultDir::begin("fail", {"cuEventQuery:1000000"});  // each call looks at it
  std::atomic<unsigned> done{0};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      EPD_CU(cuCtxSetCurrent(context_));
      const CUdeviceptr bell = memory_ + 64 * i;
      CUstream stream = nullptr;
      EPD_CU(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, -5));
      for (unsigned round = 0; round < kRounds; ++round) {
        CUevent event = nullptr;
        EPD_CU(cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING));
        for (unsigned pair = 0; pair < kPairs; ++pair) {
          EPD_CU(cuStreamWaitValue64(stream, bell, kBell, CU_STREAM_WAIT_VALUE_AND));
          EPD_CU(cuStreamWriteValue64(stream, bell, 0, 0));
        }
        EPD_CU(cuEventRecord(event, stream));
        EXPECT_EQ(cuEventQuery(event), CUDA_ERROR_NOT_READY) << "nobody else has rung so often";
        done += 1;
        EPD_CU(cuEventSynchronize(event));
        EPD_CU(cuEventQuery(event));
        EPD_CU(cuEventDestroy(event));
      }
      EPD_CU(cuStreamDestroy(stream));
    });
  }
  for (unsigned round = 1; round <= kRounds; ++round) {
    ASSERT_TRUE(comes([&] { return done == round * kThreads; }));
    for (unsigned pair = 0; pair < kPairs; ++pair) {
      for (unsigned i = 0; i < kThreads; ++i) word<std::uint64_t>(64 * i).store(i % 2 == 0 ? 1 : 1ull << 32);
      for (unsigned i = 0; i < kThreads; ++i)
        ASSERT_TRUE(comes([&] { return word<std::uint64_t>(64 * i).load() == 0; }));
    }
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(FakeCudaPairs, ASleepEndsWithTheDeviceOrTheContext) {
  CUevent event = nullptr;
  EXPECT_EQ(cuEventCreate(&event, 8), CUDA_ERROR_INVALID_VALUE);
  const auto ends = [&](CUcontext context, const std::function<void()>& end) {
    CUstream stream = nullptr;
    EPD_CU(cuCtxSetCurrent(context));
    EPD_CU(cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING));
    EPD_CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    EPD_CU(cuStreamWaitValue64(stream, memory_, kBell, CU_STREAM_WAIT_VALUE_AND));
    EPD_CU(cuEventRecord(event, stream));
    std::atomic<bool> begun{false};
    CUresult result = CUDA_SUCCESS;
    std::thread sleeper([&] {
      EPD_CU(cuCtxSetCurrent(context));
      begun = true;
      result = cuEventSynchronize(event);
    });
    EXPECT_TRUE(comes([&] { return begun.load(); }));
    end();
    sleeper.join();
    cuEventDestroy(event);
    return result;
  };
  CUcontext context = nullptr;
  EPD_CU(cuCtxCreate(&context, nullptr, 0, 0));
  const CUresult destroyed = ends(context, [&] { EPD_CU(cuCtxDestroy(context)); });
  EXPECT_TRUE(destroyed == CUDA_ERROR_CONTEXT_IS_DESTROYED || destroyed == CUDA_ERROR_INVALID_CONTEXT)
      << name_of(destroyed) << "; the latter before it sleeps";
  EXPECT_EQ(ends(context_, [] { FaultDir::begin("device-0"); }), CUDA_ERROR_ILLEGAL_ADDRESS);
  FaultDir::end("device-0");
  cuLibraryUnload(library_);
  EPD_CU(cuDevicePrimaryCtxRelease(0));
  SetUp();  // with a new context the device is as new
}

TEST_F(FakeCudaPairs, WhileNoKernelBeginsWaitsAndWritesGoOn) {
  FaultDir::begin("stuck-0");
  EPD_CU(launch(0));
  EPD_CU(cuStreamWaitValue64(other_, memory_, kBell, CU_STREAM_WAIT_VALUE_AND));
  EPD_CU(cuStreamWriteValue32(other_, memory_ + 128, 1, 0));
  EPD_CU(cuMemcpyDtoDAsync(memory_ + 192, memory_ + 128, 4, other_));
  word<std::uint64_t>(0).store(kBell);
  EPD_CU(cuStreamSynchronize(other_));
  EXPECT_EQ(word<std::uint32_t>(192).load(), 1u);
  cuFakeSettle();
  EXPECT_EQ(calls(0), 0u);
  FaultDir::end("stuck-0");
  EPD_CU(cuStreamSynchronize(stream_));
  EXPECT_EQ(calls(0), 1u);
}

TEST_F(FakeCudaPairs, KernelsOfSomeNamesMayBeginLater) {
  CUkernel probe = nullptr;
  EPD_CU(cuLibraryGetKernel(&probe, library_, kernels::cuda::kLaunchProbeKernel));
  FaultDir::begin("stuck-0", {"another", stream_kernels::kKernelNames[0]});
  EPD_CU(launch(0));
  EPD_CU(cuLaunchKernel(reinterpret_cast<CUfunction>(probe), 1, 1, 1, 1, 1, 1, 0, other_, nullptr, nullptr));
  EPD_CU(cuStreamSynchronize(other_));
  cuFakeSettle();
  EXPECT_EQ(calls(0), 0u);
  FaultDir::begin("stuck-0", {kernels::cuda::kLaunchProbeKernel});
  EPD_CU(cuStreamSynchronize(stream_));
  EXPECT_EQ(calls(0), 1u);
  EPD_CU(cuLaunchKernel(reinterpret_cast<CUfunction>(probe), 1, 1, 1, 1, 1, 1, 0, other_, nullptr, nullptr));
  cuFakeSettle();
  EXPECT_EQ(cuStreamQuery(other_), CUDA_ERROR_NOT_READY);
  FaultDir::end("stuck-0");
  EPD_CU(cuStreamSynchronize(other_));
}

// Ranks 0 and 4 are on device 0. Their operations wait for the others.
TEST(FakeCudaSms, AKernelBeginsWhenItsSmsAreFree) {
  const FaultDir faults;
  FaultDir::begin("taken-0", {std::to_string(133 - kCtas)});
  Case c;
  c.group.num_ranks = 5;
  c.group.num_experts = 5;
  c.group.hidden = 256;
  c.group.topk = 1;
  CallWorld calls(shape_of(c, 8), 8);
  const auto call = [&](std::uint32_t r) { calls.ring(r, calls.dispatch(0), {.waits = false}); };
  for (std::uint32_t r = 0; r < 5; ++r) {
    calls.open(r);
    calls.resume(r, {});
  }
  call(0);
  EXPECT_TRUE(comes([&] { return calls.inside(0); }));
  cuFakeSettle();
  EXPECT_EQ(sms_held(), 0u);
  FaultDir::begin("taken-0", {std::to_string(132 - kCtas)});
  EXPECT_TRUE(comes([&] { return sms_held() == kCtas; })) << sms_held();
  call(4);
  EXPECT_TRUE(comes([&] { return calls.inside(4); }));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(sms_held(), kCtas) << "the first one's are taken too";
  FaultDir::end("taken-0");
  EXPECT_TRUE(comes([&] { return sms_held() == 2 * kCtas; })) << sms_held();
  FaultDir::begin("taken-0");  // says nothing: all of them
  for (const std::uint32_t r : {1u, 2u, 3u}) call(r);
  for (std::uint32_t r = 0; r < 5; ++r) {
    const JournalEntry end = calls.journal(r);
    EXPECT_EQ(end.result.error, OpError::kNone) << "rank " << r << ", failed rank " << end.result.failed_rank;
  }
  EXPECT_TRUE(comes([] { return sms_held() == 0; })) << "they end all the same";
  for (std::uint32_t r = 0; r < 5; ++r) calls.close(r);
}

}  // namespace
}  // namespace epd::fake_cuda_test
