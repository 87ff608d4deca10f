// systemd's notify protocol: one datagram per message.
#pragma once

#include "common/fd.h"

#include <string>
#include <string_view>

namespace epd::supervisor {

class ServiceNotifier {
 public:
  // `path`: $NOTIFY_SOCKET; a leading '@' names an abstract socket; empty: nobody listens.
  explicit ServiceNotifier(std::string path) : path_(std::move(path)) {}
  bool enabled() const { return !path_.empty(); }
  // Newline-separated assignments, such as "READY=1\nSTATUS=serving". Never blocks; a failure is
  // logged once.
  void send(std::string_view message);

 private:
  std::string path_;
  UniqueFd socket_;
  bool complained_ = false;
};

}  // namespace epd::supervisor
