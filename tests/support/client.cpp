#include "support/client.h"

#include "support/ranks.h"

#include <unistd.h>
#include <utility>

namespace epd::test {

void must(epd_status_t status, const std::string& what, epd_status_t wanted) {
  if (status == wanted) return;
  std::string text = what + " gave " + epd_status_name(status);
  if (wanted != EPD_OK) text += ", not " + std::string(epd_status_name(wanted));
  if (status != EPD_OK) text += std::string(": ") + epd_last_error();
  throw RankFailure{text};
}

void must_say(const std::string& part) {
  const std::string text = epd_last_error();
  if (text.find(part) == std::string::npos)
    throw RankFailure{"the error says \"" + text + "\", without \"" + part + "\""};
}

Session::Session(const std::string& socket, const std::string& device, int timeout_ms) {
  epd_attach_options_t options = EPD_ATTACH_OPTIONS_INIT;
  options.socket_path = socket.c_str();
  options.device = device.empty() ? nullptr : device.c_str();
  options.timeout_ms = timeout_ms;
  must(epd_session_attach(&options, &handle_), "attach to " + device);
}

Session::Session(Session&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}

Session& Session::operator=(Session&& other) noexcept {
  if (this != &other) {
    epd_session_detach(handle_);
    handle_ = std::exchange(other.handle_, nullptr);
  }
  return *this;
}

Group::Group(const Session& session, const epd_group_config_t& config) {
  must(epd_group_join(session.get(), &config, &handle_), std::string("join ") + config.name);
}

Group::Group(Group&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}

Group& Group::operator=(Group&& other) noexcept {
  if (this != &other) {
    epd_group_leave(handle_);
    handle_ = std::exchange(other.handle_, nullptr);
  }
  return *this;
}

epd_buffers_t Group::buffers(std::uint32_t slot) const {
  epd_buffers_t buffers = EPD_BUFFERS_INIT;
  must(epd_group_buffers(handle_, slot, &buffers), "buffers of slot " + std::to_string(slot));
  return buffers;
}

epd_status_t Group::wait(epd_ticket_t ticket, int timeout_ms, epd_result_t* result) const {
  return epd_ticket_wait(handle_, ticket, timeout_ms, result);
}

epd_group_config_t small_config(const char* name, std::uint32_t rank, std::uint32_t num_ranks) {
  epd_group_config_t config = EPD_GROUP_CONFIG_INIT;
  config.name = name;
  config.rank = static_cast<std::int32_t>(rank);
  config.num_ranks = num_ranks;
  config.num_experts = num_ranks * 2;
  config.max_tokens = 16;
  config.hidden = 128;
  config.topk = 2;
  config.depth = 2;
  config.timeout_ms = 20000;
  return config;
}

bool all_devices_answer(const std::string& socket, const std::string& prefix, std::uint32_t num_devices,
                        std::string* why) {
  RankProcess probe([&]() -> std::string {
    for (std::uint32_t i = 0; i < num_devices; ++i) {
      const std::string device = prefix + ":" + std::to_string(i);
      const std::string name = "probe-" + std::to_string(::getpid()) + "-" + std::to_string(i);
      const Session session(socket, device, 2000);
      epd_group_config_t config = small_config(name.c_str(), 0, 1);
      config.timeout_ms = 5000;
      const Group group(session, config);
      epd_ticket_t ticket = 0;
      must(epd_noop(group.get(), 0, &ticket), "noop on " + device);
      must(group.wait(ticket, 5000), "noop on " + device);
    }
    return "";
  });
  const RankOutcome outcome = probe.wait(30);
  if (!outcome.ok && why != nullptr) *why = outcome.to_string();
  return outcome.ok;
}

}  // namespace epd::test
