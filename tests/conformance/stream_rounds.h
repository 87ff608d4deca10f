// Rounds of one rank, all in one stream of its own: what the tests of streams enqueue and check.
#pragma once

#include "conformance.h"

#include "support/cuda_memory.h"
#include "support/echo.h"

#include <map>

namespace epd::test {

// On GPUs, whose streams wait as they do by default, or by kernel, or by event, or some so and some so.
class StreamConformance : public Conformance {
 protected:
  std::string device_kind() const override { return "cuda"; }
  static std::uint32_t kernel_waits() {
    return GetParam().ends_with("by_kernel") ? ~0u : GetParam().ends_with("mixed") ? 0xaaaaaaaa : 0;
  }
  static std::uint32_t event_waits() {
    return GetParam().ends_with("by_event") ? ~0u : GetParam().ends_with("mixed") ? 0x44444444 : 0;
  }
  static Case stream_case(std::uint32_t num_ranks, std::uint32_t depth,
                          epd_layout_t layout = EPD_LAYOUT_COMPACT);
};
#define EPD_INSTANTIATE_STREAMS(suite)                                                               \
  INSTANTIATE_TEST_SUITE_P(Devices, suite,                                                           \
                           testing::Values("cuda", "cuda_by_kernel", "cuda_by_event", "cuda_mixed"), \
                           [](const auto& tested) { return tested.param; })
#define EPD_INSTANTIATE_CALLS(suite)                                                  \
  INSTANTIATE_TEST_SUITE_P(Devices, suite, testing::Values("cuda", "cuda_by_kernel"), \
                           [](const auto& tested) { return tested.param; })

// A ring that is full says so, and takes more as soon as the engine has.
template <typename Submit>
epd_status_t when_there_is_room(Submit submit) {
  for (const double end = now_s() + kStreamSeconds;;) {
    const epd_status_t status = submit();
    if (status != EPD_WOULD_BLOCK || now_s() > end) return status;
    must_say("ring is full");
    sleep_ms(1);
  }
}

// A round is: upload, dispatch, an expert that answers each row with the row, combine; and downloads behind
// both. Nothing waits for anything but in the stream. All throw RankFailure.
class Rounds {
 public:
  // At most so many in all, in turn on the first `slots` slots. No memory is taken later, while streams wait:
  // pinning some may wait for them.
  Rounds(const Group& group, const Case& c, std::uint32_t rank, std::size_t most, std::uint32_t slots);
  Rounds(const Group& group, const Case& c, std::uint32_t rank, std::size_t most)
      : Rounds(group, c, rank, most, c.depth) {}
  GpuStream& stream() { return stream_; }

  // Combines on the slot after the dispatch's, if it is told to.
  void submit(std::uint64_t number, std::uint32_t timeout_ms = 20000, bool elsewhere = false);
  // The status of the first operation that was refused.
  epd_status_t try_submit(std::uint64_t number, std::uint32_t timeout_ms = 20000, bool elsewhere = false);
  // For a round whose dispatch has been completed before.
  epd_status_t try_submit_combine(std::uint64_t number);

  void must_finish() { RANK_CHECK(stream_.finish(kStreamSeconds), "the stream waits"); }

  // These check all rounds since the last call of one of the three, after must_finish(): the tickets' status,
  // and for calls also that of epd_group_check.
  void check_all();
  void all_must_fail(epd_status_t status);
  // False if the engine was restarted under some of them.
  bool check_those_that_ended_well();

 private:
  struct Round {
    std::uint64_t number = 0;
    std::byte* given = nullptr;     // copies of the slot: as it was uploaded,
    std::byte* received = nullptr;  // after the dispatch,
    std::byte* combined = nullptr;  // after the combine
    epd_ticket_t dispatch = 0;
    epd_ticket_t combine = 0;
    epd_handle_t handle = 0;
  };
  static constexpr std::size_t kCopies = 3;

  std::byte* take();
  Round& add(std::uint64_t number);
  void upload(const Round& r, std::uint32_t slot);
  epd_status_t dispatch(Round& r, std::uint32_t slot, std::uint32_t timeout_ms);
  // After the operation. If it has an event, by another stream that waits for that, and for which the
  // rounds' stream waits.
  void download(epd_ticket_t ticket, std::byte* to, std::uint32_t slot);
  void answer(std::uint32_t from_slot, std::uint32_t to_slot);
  epd_status_t combine(Round& r, std::uint32_t slot, std::uint32_t timeout_ms);
  void check_received(const Round& r, const epd_result_t& result) const;
  void check_combined(const Round& r) const;

  const Group& group_;
  const Case case_;
  const std::uint32_t rank_;
  const std::uint32_t slots_;
  const std::size_t bytes_;  // of a slot
  GpuStream stream_;
  GpuStream downloads_;
  std::uint32_t failed_ = 0;  // calls, as far as has been told
  std::byte* free_ = nullptr;
  std::size_t left_ = 0;  // copies from there
  std::vector<Round> rounds_;
  std::map<std::uint64_t, epd_handle_t> handles_;  // of each round's last dispatch
};

// Rounds as above, without a stream and one after the other, each checked.
void rounds_without_a_stream(const Group& group, const Case& c, std::uint32_t rank, std::uint64_t first,
                             std::uint64_t last);

// All calls have been carried out but so many that others have been told of. Peers may have left by now.
void must_have_gone_well(const Group& group, std::uint32_t failed_before = 0);
std::uint64_t epoch_of(const Group& group);

}  // namespace epd::test
