// Memory of a client's own that engines can't map: their drivers see what the supervisor can't.
#include "gpu_fault_fixture.h"
#include "hostile.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

namespace epd::test {
namespace {

TEST_F(OneGpuFault, DescriptorsThatAreNoMemoryOfTheGpuAreNotMapped) {
  const std::size_t before = settled_memfds(daemon());
  RankProcess client([&]() -> std::string {
    const int gpu = static_cast<int>(victims_gpu());
    const GpuAllocation own = allocate_on_gpu(gpu, 1);
    HostileSession session(daemon().socket(), device_of(kVictim));
    RANK_CHECK(session.ask(abi::AttachType::kJoin, HostileSession::good_join("maps")) == "OK", "join");
    const abi::Joined joined = session.answer().read<abi::Joined>().value();
    std::uint32_t generation = 0;
    const auto map = [&](int fd, std::size_t bytes) {
      abi::MapMemory message{joined.member, 0, {}};
      message.range.generation = ++generation;
      message.range.by = abi::MemoryBy::kDescriptor;
      message.range.bytes = message.range.whole = bytes;
      const Status sent = send_message(session.socket(), abi::AttachType::kMapMemory, message, {fd}, 7);
      return sent.ok() ? session.next_answer() : sent.to_string();
    };
    const auto refused = [&](int fd, std::size_t bytes, const std::string& said) {
      const std::string answer = map(fd, bytes);
      RANK_CHECK(answer.find("INVALID_ARGUMENT: ") == 0 && answer.find(said) != std::string::npos, answer);
    };
    const UniqueFd of_host(::memfd_create("test-host-memory", MFD_CLOEXEC));
    RANK_CHECK(::ftruncate(of_host.get(), static_cast<off_t>(own.bytes)) == 0, "ftruncate");
    refused(session.socket(), own.bytes, "the descriptor is not of memory");
    refused(of_host.get(), own.bytes, "is none of a GPU");
    refused(own.fd, 2 * own.bytes, "can't be mapped as far as");
    if (gpus_->num_gpus() > 1) {
      const int other = gpu == 0 ? 1 : 0;
      refused(allocate_on_gpu(other, 1).fd, own.bytes, "is on GPU " + std::to_string(other));
    }
    const std::string mapped = map(own.fd, own.bytes);
    RANK_CHECK(mapped == "OK", mapped);
    return "";  // and it is not told that the session ends
  });
  const RankOutcome outcome = client.wait(60);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
  EXPECT_TRUE(eventually(20, [&] { return memfds_held(daemon()) == before; }))
      << "memory is left: " << memfds_held(daemon()) << ", before " << before;
  gpus_->expect_no_engine_died();
}

}  // namespace
}  // namespace epd::test
