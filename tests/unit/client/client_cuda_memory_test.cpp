// Memory of a GPU that is registered or that calls name: how libepd has it mapped.
#include "client_cuda_fixture.h"

#include <cuda.h>
#include <gtest/gtest.h>
#include <cstdint>
#include <filesystem>
#include <string>

namespace epd::testing {
namespace {

constexpr std::size_t kUnit = std::size_t{2} << 20;  // what the driver allocates
constexpr int kDevice = WatchedCuda::kDevice;

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

// An allocation of cuMemCreate as an application has it.
class Memory {
 public:
  explicit Memory(std::size_t bytes, int device = kDevice,
                  CUmemAllocationHandleType type = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
      : bytes_(bytes) {
    CUmemAllocationProp kind{};
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
    kind.requestedHandleTypes = type;
    CUmemGenericAllocationHandle handle = 0;
    EXPECT_EQ(cuMemAddressReserve(&address_, bytes_, 0, 0, 0), CUDA_SUCCESS);
    EXPECT_EQ(cuMemCreate(&handle, bytes_, &kind, 0), CUDA_SUCCESS);
    EXPECT_EQ(cuMemMap(address_, bytes_, 0, handle, 0), CUDA_SUCCESS);
    EXPECT_EQ(cuMemRelease(handle), CUDA_SUCCESS);
    const CUmemAccessDesc access{kind.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    EXPECT_EQ(cuMemSetAccess(address_, bytes_, &access, 1), CUDA_SUCCESS);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    EXPECT_EQ(cuMemUnmap(address_, bytes_), CUDA_SUCCESS);
    EXPECT_EQ(cuMemAddressFree(address_, bytes_), CUDA_SUCCESS);
  }
  char* get() const { return reinterpret_cast<char*>(address_); }  // NOLINT(performance-no-int-to-ptr)

 private:
  CUdeviceptr address_ = 0;
  const std::size_t bytes_;
};

class ClientCudaMemory : public ClientCudaBase {
 protected:
  epd_status_t join() {
    epd_group_config_t config = small_config();
    config.name = "maps";
    return epd_group_join(session_, &config, &group_);
  }
};

TEST_F(ClientCudaMemory, RegisteredMemoryIsMappedForAllGroups) {
  const Memory one(2 * kUnit);
  detach();
  ASSERT_EQ(attach_to(daemon_, &session_, 10'000, wait_by_), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_memory_register(session_, one.get() + 32, 100), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_memory_register(session_, one.get() + kUnit, kUnit), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_memory_unregister(session_, one.get() + kUnit), EPD_OK) << epd_last_error();
  ASSERT_EQ(join(), EPD_OK) << epd_last_error();
  const auto& mapped = daemon_.member().mapped;
  ASSERT_EQ(mapped.size(), 1u);
  EXPECT_EQ(mapped[0].by, abi::MemoryBy::kDescriptor);
  EXPECT_EQ(mapped[0].offset, 32u);
  EXPECT_EQ(mapped[0].bytes, 100u);
  EXPECT_EQ(mapped[0].whole, 2 * kUnit) << "a GPU maps an allocation as a whole only";
  ASSERT_EQ(epd_memory_register(session_, one.get() + kUnit, kUnit), EPD_OK) << epd_last_error();
  ASSERT_EQ(mapped.size(), 2u) << "a group that has been joined";
  EXPECT_NE(mapped[1].number, mapped[0].number);
  ASSERT_EQ(epd_memory_unregister(session_, one.get() + 32), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_memory_register(session_, one.get() + 32, 100), EPD_OK) << epd_last_error();
  EXPECT_EQ(mapped.size(), 2u) << "calls that are enqueued may name it, so it was still mapped";
  detach();
}

TEST_F(ClientCudaMemory, RangesThatCantBeRegisteredAreRefusedByName) {
  const Memory one(kUnit);
  const auto refused = [&](void* address, std::size_t bytes, epd_status_t status, const std::string& said) {
    const std::size_t before = open_descriptors();
    EXPECT_EQ(epd_memory_register(session_, address, bytes), status) << said;
    EXPECT_ERROR_HAS(said);
    EXPECT_EQ(open_descriptors(), before) << said;
  };
  char on_host[256] = {};
  refused(nullptr, 16, EPD_INVALID_ARGUMENT, "address is 0x0; allowed: a multiple of 16, not 0");
  refused(one.get() + 8, 16, EPD_INVALID_ARGUMENT, "allowed: a multiple of 16, not 0");
  refused(one.get(), 0, EPD_INVALID_ARGUMENT, "bytes is 0; allowed: 1 or more");
  refused(one.get() + 16, kUnit, EPD_INVALID_ARGUMENT,
          "bytes is 2097152; allowed: 1 .. 2097136, up to the end");
  refused(one.get(), SIZE_MAX, EPD_INVALID_ARGUMENT,
          "bytes is 18446744073709551615; allowed: 1 .. 2097152, up to the end");
  refused(reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(on_host + 15) & ~std::uintptr_t{15}), 16,
          EPD_INVALID_ARGUMENT, "where no memory of a GPU lies");
  EXPECT_EQ(epd_memory_unregister(session_, one.get()), EPD_NOT_FOUND);
  EXPECT_ERROR_HAS("where no registered range of this session begins");
  for (std::size_t i = 0; i < abi::kMaxMapped; ++i)
    ASSERT_EQ(epd_memory_register(session_, one.get() + i * 64, 64), EPD_OK) << epd_last_error();
  refused(one.get() + 48, 32, EPD_INVALID_ARGUMENT, "the range overlaps 64 bytes at 0x");
  refused(one.get() + 8192, 32, EPD_RESOURCE_EXHAUSTED,
          "64 ranges are registered in this session; allowed: 64");
  for (std::size_t i = 0; i < abi::kMaxMapped; ++i)
    ASSERT_EQ(epd_memory_unregister(session_, one.get() + i * 64), EPD_OK) << epd_last_error();
}

TEST_F(ClientCudaMemory, MemoryThatCantBePassedOnIsRefusedByName) {
  const auto refused = [&](void* address, const std::string& said) {
    const std::size_t before = open_descriptors();
    EXPECT_EQ(epd_memory_register(session_, address, kUnit), EPD_INVALID_ARGUMENT) << said;
    EXPECT_ERROR_HAS(said);
    EXPECT_EQ(open_descriptors(), before) << said;
  };
  const Memory kept(kUnit, kDevice, CU_MEM_HANDLE_TYPE_NONE);
  refused(kept.get(), "in memory that can't be exported; allowed: ");
  const Memory other(kUnit, kDevice + 1);
  refused(other.get(), "in memory of GPU " + std::to_string(kDevice + 1) + ", and the session is on GPU " +
                           std::to_string(kDevice) + "; allowed: ");
}

TEST_F(ClientCudaMemory, WhatTheDriverSaysIsPassedOn) {
  const Memory one(kUnit);
  for (const char* function : {"cuMemGetAllocationPropertiesFromHandle", "cuMemExportToShareableHandle"}) {
    cuda_.fail(function, CUDA_ERROR_UNKNOWN);
    EXPECT_EQ(epd_memory_register(session_, one.get(), kUnit), EPD_INTERNAL) << function;
    EXPECT_ERROR_HAS(std::string(function) + ": CUDA_ERROR_UNKNOWN");
    cuda_.fail(function, CUDA_SUCCESS);
  }
}

// Another allocation may lie at its address.
TEST_F(ClientCudaMemory, FreedMemoryIsNotRegisteredAnyMore) {
  detach();
  ASSERT_EQ(attach_to(daemon_, &session_, 10'000, wait_by_), EPD_OK) << epd_last_error();
  {
    const Memory one(kUnit);
    ASSERT_EQ(epd_memory_register(session_, one.get(), kUnit), EPD_OK) << epd_last_error();
  }
  const Memory again(kUnit);
  EXPECT_EQ(epd_memory_register(session_, again.get(), kUnit), EPD_OK) << epd_last_error();
  ASSERT_EQ(join(), EPD_OK) << epd_last_error();
  EXPECT_EQ(daemon_.member().mapped.size(), 1u);
  detach();
}

// The call continues for any reason, and the next ones ask no more for a while.
TEST_F(ClientCudaMemory, WhatTheEnginesCannotMapIsCopied) {
  for (const StatusCode why : {StatusCode::kInvalidArgument, StatusCode::kResourceExhausted}) {
    FakeSettings settings = cuda_settings();
    settings.refuse_map = Status(why, "memory can't be opened");
    daemon_.set(settings);
    ASSERT_EQ(attach_again(wait_by_), EPD_OK) << epd_last_error();
    const Memory one(kUnit);
    epd_memory_t memory;
    epd_memory_init(&memory);
    memory.x = one.get();
    epd_dispatch_args_t args;
    epd_dispatch_args_init(&args);
    args.num_tokens = 1;
    args.memory = &memory;
    for (int i = 0; i < 6; ++i) {
      epd_ticket_t ticket = 0;
      ASSERT_EQ(epd_dispatch(group_, &args, stream_, &ticket, nullptr), EPD_OK) << epd_last_error();
      EXPECT_EQ(last_call().flags & abi::kFlagPlaces, 0u);
      end_call();
      EXPECT_EQ(wait(ticket), EPD_OK) << epd_last_error();
    }
    EXPECT_EQ(daemon_.member(0).mapped.size(), 1u);
  }
}

}  // namespace
}  // namespace epd::testing
