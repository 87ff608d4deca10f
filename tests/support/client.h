// Owning wrappers of libepd's handles for tests, and the checks that end a rank with the library's
// own words.
#pragma once

#include "epd/epd.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace epd::test {

// Throws RankFailure unless `status` is `wanted`.
void must(epd_status_t status, const std::string& what, epd_status_t wanted = EPD_OK);
// Throws RankFailure unless the last error's text holds `part`.
void must_say(const std::string& part);

class Session {
 public:
  Session() = default;
  // device "" = the daemon's choice
  Session(const std::string& socket, const std::string& device, epd_wait_by_t wait_by = EPD_WAIT_BY_MEMOP,
          std::int32_t timeout_ms = 10'000);
  explicit Session(epd_session_t* taken_over) : handle_(taken_over) {}
  Session(Session&& other) noexcept;
  Session& operator=(Session&& other) noexcept;
  ~Session() { epd_session_detach(handle_); }
  epd_session_t* get() const { return handle_; }

 private:
  epd_session_t* handle_ = nullptr;
};

// A membership. On a CUDA device buffers() are a copy in host memory: dispatch() and combine() take the slot
// to the device first, wait() brings it back.
class Group {
 public:
  Group() = default;
  // `in_stream`: dispatch() and combine() enqueue in a stream of the group's, if its operations are calls.
  Group(const Session& session, const epd_group_config_t& config, bool in_stream = false);
  explicit Group(epd_group_t* taken_over) : handle_(taken_over) {}
  Group(Group&& other) noexcept;
  Group& operator=(Group&& other) noexcept;
  ~Group() { epd_group_leave(handle_); }
  epd_group_t* get() const { return handle_; }
  epd_buffers_t buffers(std::uint32_t slot) const;
  epd_status_t dispatch(const epd_dispatch_args_t* args, epd_ticket_t* ticket, epd_handle_t* handle) const;
  epd_status_t combine(const epd_combine_args_t* args, epd_ticket_t* ticket) const;
  // A part of buffers() that was changed while its slot has an operation in flight.
  void update(const void* part, std::size_t bytes) const;
  // The status, and what the library says of it. All that asks for a ticket's end and then looks at buffers.
  epd_status_t wait(epd_ticket_t ticket, int timeout_ms, epd_result_t* result = nullptr) const;
  // For a ticket whose end was told otherwise than by wait().
  void ended(epd_ticket_t ticket) const;

  // epd_group_restore, after which regions may lie elsewhere.
  epd_resume_info_t restore() const;
  // epd_group_active_mask, of a group of so many ranks, as kernels would read it.
  std::vector<std::int32_t> active_mask(std::uint32_t num_ranks) const;

  // Its operations are calls: see epd.h, "Calls".
  bool on_gpu() const { return on_gpu_; }

  // On a CUDA device, for tests that move slots by themselves.
  int gpu() const;
  std::size_t slot_bytes() const;
  std::byte* slot_on_gpu(std::uint32_t slot) const;
  // The regions of a slot in a copy of all of it.
  epd_buffers_t buffers_in(std::byte* copy) const;

 private:
  struct Mirror;
  epd_buffers_t on_device(std::uint32_t slot) const;
  void* stream() const;  // in which operations are submitted
  epd_status_t submitted(epd_status_t status, std::uint32_t slot, const epd_ticket_t* ticket) const;

  epd_group_t* handle_ = nullptr;
  std::shared_ptr<Mirror> mirror_;  // null on a host device
  bool on_gpu_ = false;
};

// The GPU of a session, as the driver numbers it.
int gpu_of(const epd_session_info_t& session);

// A config that is valid and small; change what the test is about.
epd_group_config_t small_config(const char* name, std::uint32_t rank, std::uint32_t num_ranks);

// Attaches to each device of the daemon and does one noop there: true when all answer.
bool all_devices_answer(const std::string& socket, const std::string& prefix, std::uint32_t num_devices,
                        std::string* why);

}  // namespace epd::test
