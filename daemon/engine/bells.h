// The two doorbells of a session, and the thread that alone touches them. A call on either walks all who wait
// on the client's end, which a client can make last (proto/README, "Doorbells"): here that holds up nobody
// else.
#pragma once

#include "base/fd.h"

#include <memory>

namespace epd {

// All calls are the loop's, and none of them waits.
class Bells {
 public:
  // `engine_bell`: an eventfd, shared with the client. `client_bell`: the engine's end of a half-closed
  // socket. `loop_bell`: an eventfd that is rung each time the client has rung, and when the bells are
  // closed. RESOURCE_EXHAUSTED: no thread, or no descriptor, is left for them.
  static Result<std::unique_ptr<Bells>> start(UniqueFd engine_bell, UniqueFd client_bell,
                                              std::shared_ptr<const UniqueFd> loop_bell);
  Bells(const Bells&) = delete;
  ~Bells() { close(); }

  void ring_client();
  // As soon as the thread gets round to it, which ends then.
  void close();
  bool closed() const;

 private:
  struct Shared;
  explicit Bells(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}

  std::shared_ptr<Shared> shared_;  // with the thread, which may outlive this
};

}  // namespace epd
