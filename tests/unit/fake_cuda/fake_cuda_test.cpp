// The fake driver behaves as the true one where the daemon and its clients would notice: memory, streams,
// events, contexts, faults.
#include "unit/fake_cuda/fake_cuda_fixture.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
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

TEST_F(FakeCuda, DevicesSayWhatAnH200Says) {
  int count = 0;
  EPD_CU(cuDeviceGetCount(&count));
  ASSERT_EQ(count, 4);
  CUuuid uuids[2];
  for (int d = 0; d < 2; ++d) EPD_CU(cuDeviceGetUuid(&uuids[d], d));
  EXPECT_NE(std::memcmp(&uuids[0], &uuids[1], sizeof(CUuuid)), 0);
  const auto attribute = [](CUdevice_attribute which) {
    int value = -1;
    EPD_CU(cuDeviceGetAttribute(&value, which, 0));
    return value;
  };
  EXPECT_EQ(attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), 132);
  EXPECT_EQ(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR), 9);
  EXPECT_EQ(attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN), 232448);
  EXPECT_EQ(attribute(CU_DEVICE_ATTRIBUTE_MPS_ENABLED), 1);
  CUdevice device = 0;
  EXPECT_EQ(cuDeviceGet(&device, 4), CUDA_ERROR_INVALID_DEVICE);
}

TEST_F(FakeCuda, AVersionedNameIsFoundByItsPlainOne) {
  void* function = nullptr;
  CUdriverProcAddressQueryResult status{};
  EPD_CU(cuGetProcAddress("cuMemAlloc", &function, CUDA_VERSION, 0, &status));
  EXPECT_EQ(function, reinterpret_cast<void*>(&cuMemAlloc));
  EXPECT_EQ(cuGetProcAddress("cuNoSuchThing", &function, CUDA_VERSION, 0, &status), CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(status, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
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

TEST_F(FakeCuda, StreamsWaitForEachOthersWords) {
  CUstream other = nullptr;
  EPD_CU(cuStreamCreateWithPriority(&other, CU_STREAM_NON_BLOCKING, -5));
  EPD_CU(cuMemsetD32Async(memory_, 0xfffffffe, 1, stream_));
  EPD_CU(cuStreamSynchronize(stream_));
  EPD_CU(cuStreamWaitValue32(stream_, memory_, 1, CU_STREAM_WAIT_VALUE_GEQ));  // across the wrap
  EPD_CU(cuMemsetD32Async(memory_ + 64, 7, 1, stream_));
  EPD_CU(cuStreamWriteValue64(stream_, memory_ + 128, 9, 0));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(cuStreamQuery(stream_), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(at<int>(memory_ + 64), 0);
  EPD_CU(cuStreamWriteValue32(other, memory_, 1, 0));
  EPD_CU(cuStreamWaitValue64(other, memory_ + 128, 9, CU_STREAM_WAIT_VALUE_EQ));
  EPD_CU(cuStreamSynchronize(other));
  EXPECT_EQ(at<int>(memory_ + 64), 7);
  EPD_CU(cuStreamWaitValue32(other, memory_ + 64, 4, CU_STREAM_WAIT_VALUE_AND));
  EPD_CU(cuStreamSynchronize(other));
  EPD_CU(cuStreamDestroy(other));
  EXPECT_EQ(cuStreamDestroy(other), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(FakeCuda, ADestroyedStreamDropsWhatComesAfterAWaitInVain) {
  EPD_CU(cuStreamWriteValue32(stream_, memory_, 1, 0));
  EPD_CU(cuStreamWaitValue32(stream_, memory_ + 64, 1, CU_STREAM_WAIT_VALUE_EQ));
  EPD_CU(cuStreamWriteValue32(stream_, memory_, 2, 0));
  for (int i = 0; i < 10'000 && at<int>(memory_) != 1; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EPD_CU(cuStreamDestroy(stream_));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(at<int>(memory_), 1);
  EPD_CU(cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
}

// Copies that depend on order, from pageable and pinned memory, and functions of the host between them.
TEST_F(FakeCuda, AStreamKeepsItsOrder) {
  std::vector<int> values(256, 3);
  int seen = 0;
  EPD_CU(cuMemcpyHtoDAsync(memory_, values.data(), 1024, stream_));
  values.assign(256, 4);  // was staged
  EPD_CU(cuMemcpyDtoDAsync(memory_ + 1024, memory_, 1024, stream_));
  const auto look = [](void* into) { ++*static_cast<int*>(into); };
  EPD_CU(cuLaunchHostFunc(stream_, look, &seen));
  EPD_CU(cuMemcpyDtoHAsync(values.data(), memory_ + 1024, 1024, stream_));
  EXPECT_EQ(values[255], 3);
  EXPECT_EQ(seen, 1);
  EPD_CU(cuMemcpyHtoD(memory_, "abc", 4));
  char text[4] = {};
  EPD_CU(cuMemcpyDtoH(text, memory_, 4));
  EXPECT_STREQ(text, "abc");
}

TEST_F(FakeCuda, TheDefaultStreamWaitsForBlockingStreamsOnly) {
  CUstream blocking = nullptr;
  EPD_CU(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
  EPD_CU(cuMemsetD8(memory_, 0, 4096));
  EPD_CU(cuStreamWaitValue32(stream_, memory_ + 64, 1, CU_STREAM_WAIT_VALUE_EQ));
  EPD_CU(cuMemsetD8(memory_, 0, 64));  // does not wait for stream_
  EPD_CU(cuStreamWaitValue32(blocking, memory_ + 128, 1, CU_STREAM_WAIT_VALUE_EQ));
  EPD_CU(cuMemsetD8Async(memory_, 5, 1, nullptr));
  EPD_CU(cuStreamWriteValue32(blocking, memory_ + 256, 6, 0));  // comes after the fill
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(at<int>(memory_), 0);
  std::atomic_ref(at<int>(memory_ + 128)).store(1);
  EPD_CU(cuStreamSynchronize(blocking));
  EXPECT_EQ(at<int>(memory_), 5);
  EXPECT_EQ(at<int>(memory_ + 256), 6);
  std::atomic_ref(at<int>(memory_ + 64)).store(1);
  EPD_CU(cuCtxSynchronize());
  EPD_CU(cuStreamDestroy(blocking));
}

TEST_F(FakeCuda, EventsOrderStreams) {
  CUevent events[2] = {};
  CUstream other = nullptr;
  EPD_CU(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  for (CUevent& event : events) EPD_CU(cuEventCreate(&event, CU_EVENT_DEFAULT));
  EXPECT_EQ(cuEventQuery(events[0]), CUDA_SUCCESS) << "never recorded";
  EPD_CU(cuEventRecord(events[0], stream_));
  EPD_CU(cuStreamWaitValue32(stream_, memory_, 1, CU_STREAM_WAIT_VALUE_EQ));
  EPD_CU(cuEventRecord(events[1], stream_));
  EPD_CU(cuStreamWaitEvent(other, events[1], 0));
  EPD_CU(cuMemsetD32Async(memory_ + 64, 3, 1, other));
  EPD_CU(cuEventSynchronize(events[0]));
  EXPECT_EQ(cuEventQuery(events[1]), CUDA_ERROR_NOT_READY);
  float milliseconds = -1.0f;
  EXPECT_EQ(cuEventElapsedTime(&milliseconds, events[0], events[1]), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(cuStreamQuery(other), CUDA_ERROR_NOT_READY);
  std::atomic_ref(at<int>(memory_)).store(1);
  EPD_CU(cuStreamSynchronize(other));
  EXPECT_EQ(at<int>(memory_ + 64), 3);
  EPD_CU(cuEventElapsedTime(&milliseconds, events[0], events[1]));
  EXPECT_GE(milliseconds, 0.0f);
  for (const CUevent event : events) EPD_CU(cuEventDestroy(event));
  EPD_CU(cuStreamDestroy(other));
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
