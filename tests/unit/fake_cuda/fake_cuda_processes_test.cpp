// The fake driver in other processes and environments; what depends on them runs in children of this
// program.
#include "unit/fake_cuda/fake_cuda_fixture.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

namespace epd::fake_cuda_test {
namespace {

using Environment = std::map<std::string, std::string>;

// What runs as a program of its own: by name, given one text, returns an exit status.
const std::map<std::string, int (*)(const std::string&)>& children();

std::string running_program;

int wait_for(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

pid_t start_child(const std::string& name, const std::string& argument, const Environment& environment = {}) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  for (const auto& [key, value] : environment) ::setenv(key.c_str(), value.c_str(), 1);
  ::execl("/proc/self/exe", running_program.c_str(), "--child", name.c_str(), argument.c_str(), nullptr);
  ::_exit(127);
}
int run_child(const std::string& name, const Environment& environment, const std::string& argument = "") {
  return wait_for(start_child(name, argument, environment));
}

// In a child: the line that is wrong.
#define CHILD_CHECK(condition)                                            \
  do {                                                                    \
    if (!(condition)) {                                                   \
      std::fprintf(stderr, "child: line %d: %s\n", __LINE__, #condition); \
      return 1;                                                           \
    }                                                                     \
  } while (0)

TEST_F(FakeCuda, AForkOfAUserIsRefused) {
  const pid_t child = ::fork();
  if (child == 0) {
    int count = 0;
    ::_exit(cuInit(0) == CUDA_ERROR_NOT_INITIALIZED && cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED
                ? 0
                : 1);
  }
  EXPECT_EQ(wait_for(child), 0);
}

// Memory and an event go to another program, which waits for the event and then reads.
TEST_F(FakeCuda, EventsAndMemoryReachAnotherProcess) {
  const CUmemAllocationProp prop = device_memory(0);
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr base = 0;
  int fd = -1;
  EPD_CU(cuMemCreate(&handle, kUnit, &prop, 0));
  EPD_CU(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  EPD_CU(cuMemRelease(handle));
  EPD_CU(cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(std::intptr_t{fd}),
                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  EPD_CU(cuMemAddressReserve(&base, kUnit, 0, 0, 0));
  EPD_CU(cuMemMap(base, kUnit, 0, handle, 0));
  EPD_CU(cuMemRelease(handle));
  EPD_CU(cuMemSetAccess(base, kUnit, &access, 1));
  CUevent event = nullptr;
  CUipcEventHandle shared;
  EXPECT_EQ(cuEventCreate(&event, CU_EVENT_INTERPROCESS), CUDA_ERROR_INVALID_VALUE) << "with timing";
  EPD_CU(cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
  EPD_CU(cuIpcGetEventHandle(&shared, event));
  const std::string file = std::string("/dev/shm/") + shared.reserved;
  EXPECT_TRUE(std::filesystem::exists(file));
  EPD_CU(cuStreamWaitValue32(stream_, base, 1, CU_STREAM_WAIT_VALUE_EQ));
  EPD_CU(cuStreamWriteValue32(stream_, base + 64, 77, 0));
  EPD_CU(cuEventRecord(event, stream_));
  ASSERT_EQ(::fcntl(fd, F_SETFD, 0), 0);
  const pid_t child = start_child("reader", std::to_string(fd) + " " + shared.reserved);
  ::close(fd);
  EXPECT_EQ(wait_for(child), 0);
  EXPECT_EQ(at<int>(base + 128), 78);
  EPD_CU(cuEventDestroy(event));
  EXPECT_FALSE(std::filesystem::exists(file));
  EPD_CU(cuMemUnmap(base, kUnit));
  EPD_CU(cuMemAddressFree(base, kUnit));
}

// Lets the other side's stream go, waits for its event on a stream, and answers.
int reader(const std::string& argument) {
  const int fd = std::atoi(argument.c_str());
  CUipcEventHandle shared{};
  argument.copy(shared.reserved, sizeof(shared.reserved) - 1, argument.find(' ') + 1);
  EPD_CU(cuCtxSetCurrent(primary_context(0)));
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr base = 0;
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  EPD_CU(cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(std::intptr_t{fd}),
                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  EPD_CU(cuMemAddressReserve(&base, kUnit, 0, 0, 0));
  EPD_CU(cuMemMap(base, kUnit, 0, handle, 0));
  EPD_CU(cuMemSetAccess(base, kUnit, &access, 1));
  CUevent event = nullptr;
  CUstream stream = nullptr;
  EPD_CU(cuIpcOpenEventHandle(&event, shared));
  EPD_CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CHILD_CHECK(cuEventQuery(event) == CUDA_ERROR_NOT_READY);
  EPD_CU(cuStreamWaitEvent(stream, event, 0));
  EPD_CU(cuMemcpyDtoDAsync(base + 128, base + 64, 4, stream));
  CHILD_CHECK(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY);
  std::atomic_ref(at<int>(base)).store(1);
  EPD_CU(cuStreamSynchronize(stream));
  CHILD_CHECK(at<int>(base + 128) == 77);
  at<int>(base + 128) = 78;
  return 0;
}

TEST(FakeCudaEnvironment, SaysWhichDevicesThereAre) {
  EXPECT_EQ(run_child("visible", {{"CUDA_VISIBLE_DEVICES", "2,3"}, {"EPD_FAKE_CUDA_MPS", "0"}}), 0);
  EXPECT_EQ(run_child("none", {{"EPD_FAKE_CUDA_DEVICES", "0"}}), 0);
  EXPECT_EQ(run_child("none", {{"CUDA_VISIBLE_DEVICES", ""}}), 0);
}

int visible(const std::string&) {
  int count = 0;
  int mps = 1;
  CUuuid uuid;
  EPD_CU(cuInit(0));
  EPD_CU(cuDeviceGetCount(&count));
  CHILD_CHECK(count == 2);
  EPD_CU(cuDeviceGetUuid(&uuid, 0));
  CHILD_CHECK(uuid.bytes[15] == 3);
  EPD_CU(cuDeviceGetAttribute(&mps, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, 1));
  CHILD_CHECK(mps == 0);
  return 0;
}

int none(const std::string&) {
  CHILD_CHECK(cuInit(0) == CUDA_ERROR_NO_DEVICE);
  return 0;
}

TEST(FakeCudaEnvironment, MakesTheNthCallFail) {
  EXPECT_EQ(run_child("failing", {{"EPD_FAKE_CUDA_FAIL", "cuMemCreate:2,cuStreamWriteValue32:3@1"}}), 0);
}

int failing(const std::string&) {
  EPD_CU(cuCtxSetCurrent(primary_context(1)));
  const CUmemAllocationProp prop = device_memory(0);
  CUmemGenericAllocationHandle handle = 0;
  EPD_CU(cuMemCreate(&handle, kUnit, &prop, 0));
  CHILD_CHECK(cuMemCreate(&handle, kUnit, &prop, 0) == CUDA_ERROR_OUT_OF_MEMORY);
  EPD_CU(cuMemCreate(&handle, kUnit, &prop, 0));
  CUdeviceptr word = 0;
  CUstream stream = nullptr;
  EPD_CU(cuMemAlloc(&word, 64));
  EPD_CU(cuStreamCreate(&stream, 0));
  for (int i = 0; i < 2; ++i) EPD_CU(cuStreamWriteValue32(stream, word, 1, 0));
  EPD_CU(cuStreamSynchronize(stream));
  CHILD_CHECK(cuStreamWriteValue32(stream, word, 1, 0) == CUDA_ERROR_ILLEGAL_ADDRESS);
  CHILD_CHECK(cuStreamWriteValue32(stream, word, 1, 0) == CUDA_ERROR_ILLEGAL_ADDRESS);
  CHILD_CHECK(cuMemAlloc(&word, 64) == CUDA_ERROR_ILLEGAL_ADDRESS);
  EPD_CU(cuCtxSetCurrent(primary_context(0)));
  EPD_CU(cuMemAlloc(&word, 64));
  EPD_CU(cuMemCreate(&handle, kUnit, &prop, 0));
  return 0;
}

// A file makes a device fault in every process that has a context there, at any time.
TEST(FakeCudaEnvironment, AFileMakesADeviceFault) {
  const std::filesystem::path directory =
      std::filesystem::temp_directory_path() / ("fake_cuda_test." + std::to_string(::getpid()));
  std::filesystem::create_directory(directory);
  EXPECT_EQ(run_child("faulting", {{"EPD_FAKE_CUDA_FAULT_DIR", directory.string()}}, directory.string()), 0);
  std::filesystem::remove_all(directory);
}

int faulting(const std::string& directory) {
  const CUcontext first = primary_context(0);
  EPD_CU(cuCtxSetCurrent(first));
  CUdeviceptr word = 0;
  CUstream stream = nullptr;
  EPD_CU(cuMemAlloc(&word, 64));
  EPD_CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  EPD_CU(cuStreamWaitValue32(stream, word, 1, CU_STREAM_WAIT_VALUE_EQ));
  std::thread switches([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::ofstream file(directory + "/device-0");
  });
  const CUresult ended = cuStreamSynchronize(stream);
  switches.join();
  CHILD_CHECK(ended == CUDA_ERROR_ILLEGAL_ADDRESS);
  EPD_CU(cuCtxSetCurrent(primary_context(1)));
  EPD_CU(cuMemAlloc(&word, 64));
  std::filesystem::remove(directory + "/device-0");
  EPD_CU(cuCtxSetCurrent(first));
  CHILD_CHECK(cuMemAlloc(&word, 64) == CUDA_ERROR_ILLEGAL_ADDRESS);
  EPD_CU(cuDevicePrimaryCtxRelease(0));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::ofstream(directory + "/busy-0").close();
  CUcontext none = nullptr;
  CHILD_CHECK(cuDevicePrimaryCtxRetain(&none, 0) == CUDA_ERROR_MPS_SERVER_NOT_READY);
  std::filesystem::remove(directory + "/busy-0");
  EPD_CU(cuCtxSetCurrent(primary_context(0)));
  EPD_CU(cuMemAlloc(&word, 64));
  return 0;
}

TEST(FakeCudaEnvironment, KeepsDevicesApart) {
  EXPECT_EQ(run_child("apart", {{"EPD_FAKE_CUDA_NO_PEER", "2-0"}}), 0);
}

int apart(const std::string&) {
  EPD_CU(cuCtxSetCurrent(primary_context(0)));
  int can = 1;
  EPD_CU(cuDeviceCanAccessPeer(&can, 0, 2));
  CHILD_CHECK(can == 0);
  EPD_CU(cuDeviceCanAccessPeer(&can, 0, 1));
  CHILD_CHECK(can == 1);
  const CUmemAllocationProp prop = device_memory(0);
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr base = 0;
  EPD_CU(cuMemCreate(&handle, kUnit, &prop, 0));
  EPD_CU(cuMemAddressReserve(&base, kUnit, 0, 0, 0));
  EPD_CU(cuMemMap(base, kUnit, 0, handle, 0));
  for (const int device : {0, 1, 2}) {
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const CUresult wanted = device == 2 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
    CHILD_CHECK(cuMemSetAccess(base, kUnit, &access, 1) == wanted);
  }
  return 0;
}

const std::map<std::string, int (*)(const std::string&)>& children() {
  static const std::map<std::string, int (*)(const std::string&)> all = {
      {"reader", reader},   {"visible", visible},   {"none", none},
      {"failing", failing}, {"faulting", faulting}, {"apart", apart}};
  return all;
}

int run_as_child(const std::string& name, const std::string& argument) {
  try {
    return children().at(name)(argument);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "child %s: %s\n", name.c_str(), error.what());
    return 1;
  }
}

}  // namespace
}  // namespace epd::fake_cuda_test

int main(int argc, char** argv) {
  using namespace epd::fake_cuda_test;
  running_program = argv[0];
  if (argc == 4 && std::string(argv[1]) == "--child") return run_as_child(argv[2], argv[3]);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
