// A peer in a process of its own, over UCX: to be talked to, killed and stopped.
#pragma once

#include "common/fd.h"
#include "transport_flavors.h"

#include <sys/types.h>
#include <string>

namespace epd::transport {

class Child {
 public:
  // `mode`: "listen": receives; "talk": also sends, as fast as it can; "echo": sends as many bytes back as
  // have come. `name`: as of an End. It sleeps when there is nothing to do.
  explicit Child(const std::string& mode, std::uint64_t name = 2, Carrier carrier = Carrier::kUcx);
  ~Child();
  const Address& address() const { return address_; }
  // The child connects to it and begins.
  void introduce(const Address& own);
  pid_t pid() const { return pid_; }
  void signal(int number) const;
  void kill_and_reap();

 private:
  pid_t pid_ = -1;
  UniqueFd to_;
  UniqueFd from_;
  Address address_;
};

// The limits of the child's transport.
inline constexpr Limits kChildLimits{8 << 20, 256};

// The body of the process's main().
int run_child(const std::string& mode, std::uint64_t name, Carrier carrier);

}  // namespace epd::transport
