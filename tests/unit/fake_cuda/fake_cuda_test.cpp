// The fake driver refuses what the true one refuses. That it does what it is asked, all tests on it show.
#include "unit/fake_cuda/fake_cuda_fixture.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>
#include <vector>

namespace epd::fake_cuda_test {
namespace {

// Whether this process may read and write there. A system call looks, so that nothing faults.
bool can_read(CUdeviceptr address) {
  int ends[2];
  if (::pipe(ends) != 0) return false;
  const bool can = ::write(ends[1], reinterpret_cast<const void*>(address), 1) == 1;
  ::close(ends[0]);
  ::close(ends[1]);
  return can;
}

TEST_F(FakeCuda, WithoutAContextOnlyVirtualMemoryWorks) {
  cuCtxSetCurrent(nullptr);
  CUdeviceptr memory = 0;
  CUstream stream = nullptr;
  EXPECT_EQ(cuMemAlloc(&memory, 1), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuStreamCreate(&stream, 0), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuStreamQuery(stream_), CUDA_ERROR_INVALID_CONTEXT);
  Arena arena(0, kUnit);
  EXPECT_NE(arena.take<char>(1), nullptr);
}

TEST_F(FakeCuda, MemoryComesInUnitsAndIsReachedOnlyWhenAllowed) {
  const CUmemAllocationProp prop = device_memory(1);
  std::size_t unit = 0;
  EPD_CU(cuMemGetAllocationGranularity(&unit, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  EXPECT_EQ(unit, kUnit);
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(cuMemCreate(&handle, 4096, &prop, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemCreate(&handle, kUnit << 20, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
  EPD_CU(cuMemCreate(&handle, 2 * kUnit, &prop, 0));
  CUdeviceptr base = 0;
  EXPECT_EQ(cuMemMap(memory_, 2 * kUnit, 0, handle, 0), CUDA_ERROR_INVALID_VALUE) << "not reserved";
  EPD_CU(cuMemAddressReserve(&base, 2 * kUnit, 0, 0, 0));
  EPD_CU(cuMemMap(base, 2 * kUnit, 0, handle, 0));
  EXPECT_EQ(cuMemMap(base, 2 * kUnit, 0, handle, 0), CUDA_ERROR_INVALID_VALUE) << "twice";
  EXPECT_FALSE(can_read(base));
  EXPECT_EQ(cuMemsetD8(base, 1, 16), CUDA_ERROR_INVALID_VALUE);
  CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  EXPECT_EQ(cuMemSetAccess(base, kUnit, &access, 1), CUDA_ERROR_INVALID_VALUE) << "half a mapping";
  EPD_CU(cuMemSetAccess(base, 2 * kUnit, &access, 1));
  EPD_CU(cuMemsetD8(base, 1, 2 * kUnit));
  EXPECT_EQ(cuMemAddressFree(base, 2 * kUnit), CUDA_ERROR_INVALID_VALUE) << "still mapped";
  EPD_CU(cuMemUnmap(base, 2 * kUnit));
  EXPECT_FALSE(can_read(base));
  EXPECT_EQ(cuMemUnmap(base, 2 * kUnit), CUDA_ERROR_INVALID_VALUE);
  EPD_CU(cuMemAddressFree(base, 2 * kUnit));
  EPD_CU(cuMemRelease(handle));
  EXPECT_EQ(cuMemRelease(handle), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(FakeCuda, ADescriptorIsTheSameMemoryElsewhereAndOthersAreRefused) {
  const CUmemAllocationProp prop = device_memory(0);
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CUmemGenericAllocationHandle handles[2] = {};
  CUdeviceptr bases[2] = {};
  EPD_CU(cuMemCreate(&handles[0], kUnit, &prop, 0));
  int fd = -1;
  EPD_CU(cuMemExportToShareableHandle(&fd, handles[0], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  EPD_CU(cuMemImportFromShareableHandle(&handles[1], reinterpret_cast<void*>(std::intptr_t{fd}),
                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  ::close(fd);
  for (int i = 0; i < 2; ++i) {
    EPD_CU(cuMemAddressReserve(&bases[i], kUnit, 0, 0, 0));
    EPD_CU(cuMemMap(bases[i], kUnit, 0, handles[i], 0));
    EPD_CU(cuMemRelease(handles[i]));  // the mapping keeps it
    EPD_CU(cuMemSetAccess(bases[i], kUnit, &access, 1));
  }
  at<int>(bases[0] + 4096) = 42;
  EXPECT_EQ(at<int>(bases[1] + 4096), 42);
  for (const CUdeviceptr base : bases) {
    EPD_CU(cuMemUnmap(base, kUnit));
    EPD_CU(cuMemAddressFree(base, kUnit));
  }
  const int other = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  EXPECT_EQ(cuMemImportFromShareableHandle(&handles[0], reinterpret_cast<void*>(std::intptr_t{other}),
                                           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
            CUDA_ERROR_INVALID_VALUE);
  ::close(other);
}

// Where the stream's thread is when its memory goes differs from round to round.
TEST_F(FakeCuda, ADestroyedStreamThatWaitedFaultsOnNoMemoryThatIsFreedBehindIt) {
  for (int i = 0; i < 200; ++i) {
    const auto memory = std::make_unique<Arena>(0, kUnit);
    CUstream waiting = nullptr;
    EPD_CU(cuStreamCreate(&waiting, CU_STREAM_NON_BLOCKING));
    EPD_CU(cuStreamWaitValue32(waiting, reinterpret_cast<CUdeviceptr>(memory->take<std::uint32_t>(1)), 1, 0));
    std::this_thread::sleep_for(std::chrono::microseconds(i));
    EPD_CU(cuStreamDestroy(waiting));
  }
  EPD_CU(cuCtxSynchronize());
}

TEST_F(FakeCuda, HostMemoryIsKnownWhenItIsPinned) {
  std::vector<std::uint32_t> words(1024);
  CUdeviceptr address = 0;
  EXPECT_EQ(cuMemHostGetDevicePointer(&address, words.data(), 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuStreamWriteValue32(stream_, reinterpret_cast<CUdeviceptr>(words.data()), 1, 0),
            CUDA_ERROR_INVALID_VALUE);
  EPD_CU(cuMemHostRegister(words.data(), 4096, CU_MEMHOSTREGISTER_DEVICEMAP));
  EXPECT_EQ(cuMemHostRegister(words.data(), 4096, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  EPD_CU(cuMemHostGetDevicePointer(&address, words.data(), 0));
  EPD_CU(cuStreamWriteValue32(stream_, address, 5, 0));
  EPD_CU(cuStreamSynchronize(stream_));
  EXPECT_EQ(words[0], 5u);
  EPD_CU(cuMemHostUnregister(words.data()));
  EXPECT_EQ(cuMemHostUnregister(words.data()), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

TEST_F(FakeCuda, MemoryIsAnotherDevicesOnceThatMayReachIt) {
  const auto write = [](int device, CUdeviceptr address) {
    CUstream stream = nullptr;
    EPD_CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    EPD_CU(cuStreamWriteValue32(stream, address, 1 + device, 0));
    const CUresult result = cuStreamSynchronize(stream);
    cuStreamDestroy(stream);
    return result;
  };
  CUcontext peer = primary_context(1);
  EPD_CU(cuCtxSetCurrent(peer));
  EXPECT_EQ(cuCtxEnablePeerAccess(peer, 0), CUDA_ERROR_INVALID_DEVICE);
  EPD_CU(cuCtxEnablePeerAccess(context_, 0));
  EXPECT_EQ(cuCtxEnablePeerAccess(context_, 0), CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
  EXPECT_EQ(write(1, memory_), CUDA_SUCCESS);
  EXPECT_EQ(at<int>(memory_), 2);
  EPD_CU(cuCtxSetCurrent(context_));
  CUdeviceptr later = 0;
  EPD_CU(cuMemAlloc(&later, 4096));
  EPD_CU(cuCtxSetCurrent(peer));
  EXPECT_EQ(write(1, later), CUDA_SUCCESS);
  EPD_CU(cuCtxSetCurrent(primary_context(2)));
  EXPECT_EQ(write(2, later), CUDA_ERROR_ILLEGAL_ADDRESS) << "nobody let that one";
  EXPECT_EQ(at<int>(later), 2);
  for (const int device : {1, 2}) EXPECT_EQ(cuDevicePrimaryCtxRelease(device), CUDA_SUCCESS);
  EPD_CU(cuCtxSetCurrent(context_));
  EPD_CU(cuMemFree(later));
}

TEST_F(FakeCuda, WaitsOfUnknownFlagsOrUnalignedWordsAreRefused) {
  for (const unsigned flags : {4u, 0x10u, static_cast<unsigned>(CU_STREAM_WAIT_VALUE_FLUSH)}) {
    EXPECT_EQ(cuStreamWaitValue32(stream_, memory_, 0, flags), CUDA_ERROR_INVALID_VALUE) << flags;
    EXPECT_EQ(cuStreamWaitValue64(stream_, memory_, 0, flags), CUDA_ERROR_INVALID_VALUE) << flags;
  }
  EXPECT_EQ(cuStreamWaitValue64(stream_, memory_ + 4, 0, CU_STREAM_WAIT_VALUE_AND), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuStreamWaitValue32(stream_, memory_ + 2, 0, CU_STREAM_WAIT_VALUE_AND), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(FakeCuda, AForkOfAUserIsRefused) {
  const pid_t child = ::fork();
  if (child == 0) {
    int count = 0;
    ::_exit(cuInit(0) == CUDA_ERROR_NOT_INITIALIZED && cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED
                ? 0
                : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(FakeCuda, AWordThatIsUnmappedUnderAWaitEndsTheContext) {
  CUdeviceptr base = 0;
  {
    Arena arena(0, kUnit);
    base = reinterpret_cast<CUdeviceptr>(arena.take<char>(64));
    EPD_CU(cuStreamWaitValue32(stream_, base, 1, CU_STREAM_WAIT_VALUE_EQ));
  }
  EXPECT_EQ(cuStreamSynchronize(stream_), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(cuMemFree(memory_), CUDA_ERROR_ILLEGAL_ADDRESS);
  EPD_CU(cuDevicePrimaryCtxRelease(0));
  SetUp();  // with a new context the device is as new
}

}  // namespace
}  // namespace epd::fake_cuda_test
