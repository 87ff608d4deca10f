// Memory of a GPU that libepd finds by its address and passes on, and memory that it makes for that.
#include "client_cuda_fixture.h"

#include <cuda.h>
#include <gtest/gtest.h>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace epd::testing {
namespace {

constexpr std::size_t kUnit = std::size_t{2} << 20;  // what the driver allocates
constexpr int kDevice = WatchedCuda::kDevice;

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

struct Free {
  void operator()(char* memory) const { epd_memory_free(memory, 0, kDevice, nullptr); }
};
using Memory = std::unique_ptr<char, Free>;

Memory allocate(std::size_t bytes) {
  return Memory(static_cast<char*>(epd_memory_alloc(bytes, kDevice, nullptr)));
}

// Mapped as an application does it, without access.
class Mapped {
 public:
  Mapped(CUmemAllocationHandleType type, std::size_t allocations) : bytes_(allocations * kUnit) {
    CUmemAllocationProp kind{};
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location = {CU_MEM_LOCATION_TYPE_DEVICE, {kDevice}};
    kind.requestedHandleTypes = type;
    EXPECT_EQ(cuMemAddressReserve(&address_, bytes_, 0, 0, 0), CUDA_SUCCESS);
    for (std::size_t at = 0; at < bytes_; at += kUnit) {
      CUmemGenericAllocationHandle handle = 0;
      EXPECT_EQ(cuMemCreate(&handle, kUnit, &kind, 0), CUDA_SUCCESS);
      EXPECT_EQ(cuMemMap(address_ + at, kUnit, 0, handle, 0), CUDA_SUCCESS);
      EXPECT_EQ(cuMemRelease(handle), CUDA_SUCCESS);
    }
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  ~Mapped() {
    EXPECT_EQ(cuMemUnmap(address_, bytes_), CUDA_SUCCESS);
    EXPECT_EQ(cuMemAddressFree(address_, bytes_), CUDA_SUCCESS);
  }
  void* at(std::size_t offset) const {
    return reinterpret_cast<void*>(address_ + offset);  // NOLINT(performance-no-int-to-ptr)
  }

 private:
  CUdeviceptr address_ = 0;
  const std::size_t bytes_;
};

epd_binding_t bind(epd_region_t region, void* address) {
  epd_binding_t made;
  epd_binding_init(&made);
  made.region = region;
  made.fd = EPD_FD_OF_ADDRESS;
  made.address = address;
  return made;
}

class ClientCudaBindings : public ClientCudaBase {
 protected:
  epd_status_t join(const std::vector<epd_binding_t>& bindings, epd_group_t** group) {
    epd_group_config_t config = small_config();
    config.name = "bound";
    config.bindings = bindings.data();
    config.num_bindings = static_cast<std::uint32_t>(bindings.size());
    return epd_group_join(session_, &config, group);
  }
  void expect_refused(const epd_binding_t& bad, const std::string& said) {
    const std::size_t before = open_descriptors();
    epd_group_t* group = nullptr;
    EXPECT_EQ(join({bad}, &group), EPD_INVALID_ARGUMENT) << said;
    EXPECT_ERROR_HAS(said);
    EXPECT_EQ(open_descriptors(), before) << said;
  }
};

TEST_F(ClientCudaBindings, AddressesBecomeDescriptorsOfTheirAllocations) {
  const Memory one = allocate(kUnit + 1);
  const Memory two = allocate(1);
  ASSERT_NE(one, nullptr) << epd_last_error();
  ASSERT_NE(two, nullptr) << epd_last_error();
  std::vector<epd_binding_t> bindings = {bind(EPD_REGION_X, one.get() + 256), bind(EPD_REGION_OUT, two.get()),
                                         bind(EPD_REGION_RECV_X, one.get() + kUnit)};
  bindings[0].stride = 4096;
  detach();
  ASSERT_EQ(attach_to(daemon_, &session_, 10'000, wait_by_), EPD_OK) << epd_last_error();
  ASSERT_EQ(join(bindings, &group_), EPD_OK) << epd_last_error();
  const FakeMember& member = daemon_.member();
  ASSERT_EQ(member.memory.size(), 2u) << "each allocation goes once";
  const abi::Binding& x = member.bindings[EPD_REGION_X];
  const abi::Binding& recv_x = member.bindings[EPD_REGION_RECV_X];
  const abi::Binding& out = member.bindings[EPD_REGION_OUT];
  EXPECT_EQ(x.memory, 1u);
  EXPECT_EQ(x.offset, 256u);
  EXPECT_EQ(x.stride, 4096u);
  EXPECT_EQ(out.memory, 2u);
  EXPECT_EQ(out.offset, 0u);
  EXPECT_EQ(recv_x.memory, 1u);
  EXPECT_EQ(recv_x.offset, kUnit);
  EXPECT_EQ(member.bindings.whole[0], 2 * kUnit) << "a GPU maps an allocation as a whole only";
  EXPECT_EQ(member.bindings.whole[1], kUnit);
  epd_buffers_t buffers;
  epd_buffers_init(&buffers);
  ASSERT_EQ(epd_group_buffers(group_, 2, &buffers), EPD_OK);
  EXPECT_EQ(buffers.x, one.get() + 256 + std::size_t{2} * 4096);
  // What the daemon got is that memory.
  static_cast<char*>(buffers.x)[5] = 'x';
  const auto read = [&member](std::size_t memory, std::uint64_t offset) {
    char byte = 0;
    EXPECT_EQ(::pread(member.memory[memory].get(), &byte, 1, static_cast<off_t>(offset)), 1);
    return byte;
  };
  EXPECT_EQ(read(0, x.offset + 2 * x.stride + 5), 'x');
  EXPECT_EQ(read(1, 0), 0);
  detach();
}

TEST_F(ClientCudaBindings, ADescriptorAndAnAddressMayBeMixed) {
  const Memory one = allocate(kUnit);
  const UniqueFd other(::memfd_create("binding", MFD_CLOEXEC));
  epd_binding_t by_fd = bind(EPD_REGION_OUT, one.get());
  by_fd.fd = other.get();
  by_fd.offset = 384;
  detach();
  ASSERT_EQ(attach_to(daemon_, &session_, 10'000, wait_by_), EPD_OK) << epd_last_error();
  const std::size_t before = open_descriptors();
  ASSERT_EQ(join({by_fd, bind(EPD_REGION_X, one.get())}, &group_), EPD_OK) << epd_last_error();
  EXPECT_EQ(daemon_.member().bindings[EPD_REGION_OUT].offset, 384u);
  EXPECT_EQ(daemon_.member().bindings[EPD_REGION_OUT].memory, 1u);
  EXPECT_EQ(daemon_.member().bindings[EPD_REGION_X].memory, 2u);
  ASSERT_EQ(epd_group_leave(group_), EPD_OK);
  group_ = nullptr;
  const std::size_t of_the_daemon = 2;  // it is in this process, and keeps what it got
  EXPECT_LE(open_descriptors(), before + of_the_daemon + 2);
  detach();
}

TEST_F(ClientCudaBindings, MemoryThatCantBePassedOnIsRefusedByName) {
  const Memory one = allocate(kUnit);
  CUdeviceptr plain = 0;
  cuda_.set_current(cuda_.context());
  ASSERT_EQ(cuMemAlloc(&plain, kUnit), CUDA_SUCCESS);
  char on_host[256];
  const auto address = [](std::uintptr_t at) {
    return reinterpret_cast<void*>(at);  // NOLINT(performance-no-int-to-ptr)
  };
  expect_refused(bind(EPD_REGION_X, address(plain)), "where no memory of cuMemCreate is mapped; allowed: ");
  expect_refused(bind(EPD_REGION_X, on_host), "bindings[0]: address is 0x");
  {
    const Mapped kept(CU_MEM_HANDLE_TYPE_NONE, 1);
    expect_refused(bind(EPD_REGION_X, kept.at(128)), "in memory that can't be exported; allowed: ");
    // The region begins in one allocation and ends in the next, as those of torch's expandable segments.
    const Mapped two(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 2);
    expect_refused(bind(EPD_REGION_X, two.at(kUnit - 1024)),
                   "bindings[0]: x ends 7168 bytes behind the allocation of 2097152 bytes");
  }
  expect_refused(bind(EPD_REGION_X, one.get() + 64), "binding of x: offset is 64; allowed: multiples of 128");
  epd_binding_t twice = bind(EPD_REGION_X, one.get());
  twice.offset = 128;
  expect_refused(twice, "bindings[0].offset is 128; allowed: 0 with EPD_FD_OF_ADDRESS");
  expect_refused(bind(EPD_REGION_X, nullptr), "bindings[0].address is NULL");
  ASSERT_EQ(cuMemFree(plain), CUDA_SUCCESS);
  cuda_.set_current(nullptr);
}

TEST_F(ClientCudaBindings, WhatTheDriverSaysIsPassedOn) {
  const Memory one = allocate(kUnit);
  for (const char* function :
       {"cuMemGetAllocationPropertiesFromHandle", "cuMemGetAddressRange", "cuMemExportToShareableHandle"}) {
    cuda_.fail(function, CUDA_ERROR_UNKNOWN);
    epd_group_t* group = nullptr;
    EXPECT_EQ(join({bind(EPD_REGION_X, one.get())}, &group), EPD_INTERNAL) << function;
    EXPECT_ERROR_HAS("bindings[0]: " + std::string(function) + ": CUDA_ERROR_UNKNOWN");
    cuda_.fail(function, CUDA_SUCCESS);
  }
}

TEST_F(ClientCudaBindings, RegisteredMemoryIsMappedForAllGroups) {
  const Memory one = allocate(2 * kUnit);
  detach();
  ASSERT_EQ(attach_to(daemon_, &session_, 10'000, wait_by_), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_memory_register(session_, one.get() + 32, 100), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_memory_register(session_, one.get() + kUnit, kUnit), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_memory_unregister(session_, one.get() + kUnit), EPD_OK) << epd_last_error();
  ASSERT_EQ(join({}, &group_), EPD_OK) << epd_last_error();
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

TEST_F(ClientCudaBindings, RangesThatCantBeRegisteredAreRefusedByName) {
  const Memory one = allocate(kUnit);
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

// The daemon would refuse each join that brings it.
TEST_F(ClientCudaBindings, MemoryOfAnotherGpuIsRefusedByName) {
  constexpr int kOther = kDevice + 1;
  const Memory other(static_cast<char*>(epd_memory_alloc(kUnit, kOther, nullptr)));
  ASSERT_NE(other, nullptr) << epd_last_error();
  const std::string said = "in memory of GPU " + std::to_string(kOther) + ", and the session is on GPU " +
                           std::to_string(kDevice) + "; allowed: ";
  expect_refused(bind(EPD_REGION_X, other.get()), said);
  EXPECT_EQ(epd_memory_register(session_, other.get(), kUnit), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS(said);
}

// Another allocation may lie at its address.
TEST_F(ClientCudaBindings, FreedMemoryIsNotRegisteredAnyMore) {
  detach();
  ASSERT_EQ(attach_to(daemon_, &session_, 10'000, wait_by_), EPD_OK) << epd_last_error();
  {
    const Memory one = allocate(kUnit);
    ASSERT_EQ(epd_memory_register(session_, one.get(), kUnit), EPD_OK) << epd_last_error();
  }
  const Memory again = allocate(kUnit);
  EXPECT_EQ(epd_memory_register(session_, again.get(), kUnit), EPD_OK) << epd_last_error();
  ASSERT_EQ(join({}, &group_), EPD_OK) << epd_last_error();
  EXPECT_EQ(daemon_.member().mapped.size(), 1u);
  detach();
}

// The call continues for any reason, and the next ones ask no more for a while.
TEST_F(ClientCudaBindings, WhatTheEnginesCannotMapIsCopied) {
  for (const StatusCode why : {StatusCode::kInvalidArgument, StatusCode::kResourceExhausted}) {
    FakeSettings settings = cuda_settings();
    settings.refuse_map = Status(why, "memory can't be opened");
    daemon_.set(settings);
    ASSERT_EQ(attach_again(wait_by_), EPD_OK) << epd_last_error();
    const Memory one = allocate(kUnit);
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

class ClientCudaMemory : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(cuda_.current(), nullptr);
    EXPECT_EQ(cuda_.mapped_bytes(), 0u);
    EXPECT_EQ(cuda_.retained(), 0);
    for (const std::string& mistake : cuda_.mistakes()) ADD_FAILURE() << mistake;
  }
  void expect_nothing(std::size_t bytes, int device, const std::string& said) {
    EXPECT_EQ(epd_memory_alloc(bytes, device, nullptr), nullptr) << said;
    EXPECT_ERROR_HAS(said);
  }

  WatchedCuda cuda_;
};

TEST_F(ClientCudaMemory, IsTheCallersToUse) {
  const Memory one = allocate(3 * kUnit - 1);
  ASSERT_NE(one, nullptr) << epd_last_error();
  EXPECT_EQ(cuda_.mapped_bytes(), 3 * kUnit);
  const Memory two = allocate(1);
  EXPECT_NE(one, two);
  cuda_.set_current(cuda_.context());
  const CUdeviceptr end = reinterpret_cast<CUdeviceptr>(one.get()) + 3 * kUnit - 1;
  const char byte = 7;
  EXPECT_EQ(cuMemcpyHtoD(end, &byte, 1), CUDA_SUCCESS);
  char read = 0;
  EXPECT_EQ(cuMemcpyDtoH(&read, end, 1), CUDA_SUCCESS);
  EXPECT_EQ(read, 7);
  cuda_.set_current(nullptr);
}

TEST_F(ClientCudaMemory, RefusalsLeaveNothing) {
  expect_nothing(0, kDevice, "bytes is 0; allowed: more");
  expect_nothing(kUnit, -1, "device is -1; allowed: 0 .. ");
  expect_nothing(kUnit, 99, "device is 99; allowed: 0 .. ");
  expect_nothing(std::size_t{1} << 40, kDevice,
                 "cuMemCreate of 1099511627776 bytes: CUDA_ERROR_OUT_OF_MEMORY");
  for (const char* function : {"cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
    cuda_.fail(function, CUDA_ERROR_UNKNOWN);
    expect_nothing(1, kDevice, std::string(function) + " of 2097152 bytes of exportable memory: ");
    cuda_.fail(function, CUDA_SUCCESS);
    EXPECT_EQ(cuda_.mapped_bytes(), 0u) << function;
  }
}

TEST_F(ClientCudaMemory, FreeWaitsForTheGpuAndKeepsWhatMayBeInUse) {
  auto* const memory = static_cast<char*>(epd_memory_alloc(kUnit, kDevice, nullptr));
  ASSERT_NE(memory, nullptr) << epd_last_error();
  cuda_.fail("cuCtxSynchronize", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  epd_memory_free(memory, kUnit, kDevice, nullptr);
  EXPECT_ERROR_HAS("cuCtxSynchronize: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED");
  EXPECT_EQ(cuda_.mapped_bytes(), kUnit);
  cuda_.fail("cuCtxSynchronize", CUDA_SUCCESS);
  const int before = cuda_.synchronized();
  epd_memory_free(memory, kUnit, kDevice, nullptr);
  EXPECT_EQ(cuda_.synchronized(), before + 1);
  EXPECT_EQ(cuda_.mapped_bytes(), 0u);
  epd_memory_free(memory, kUnit, kDevice, nullptr);
  EXPECT_ERROR_HAS("; allowed: what epd_memory_alloc returned, once");
  epd_memory_free(nullptr, 0, kDevice, nullptr);
}

}  // namespace
}  // namespace epd::testing
