// A transport that is another one: for those that change some calls.
#pragma once

#include "transport/transport.h"

#include <memory>

namespace epd::test {

class WrappedTransport : public transport::Transport {
 public:
  explicit WrappedTransport(std::unique_ptr<transport::Transport> inner) : inner_(std::move(inner)) {}

  const transport::Address& address() const override { return inner_->address(); }
  const transport::Limits& limits() const override { return inner_->limits(); }
  std::string carrier() const override { return inner_->carrier(); }
  Result<transport::PeerId> connect(std::span<const std::byte> address) override {
    return inner_->connect(address);
  }
  Status close(transport::PeerId peer) override { return inner_->close(peer); }
  Status send(transport::PeerId peer, std::span<const std::byte> header, std::span<const std::byte> body,
              std::uint64_t cookie) override {
    return inner_->send(peer, header, body, cookie);
  }
  Status flush(transport::PeerId peer, std::uint64_t cookie) override { return inner_->flush(peer, cookie); }
  void release(const transport::Body& body) override { inner_->release(body); }
  std::size_t progress(std::span<transport::Event> events) override { return inner_->progress(events); }
  int wait_fd() const override { return inner_->wait_fd(); }
  bool arm() override { return inner_->arm(); }
  transport::Counters counters() const override { return inner_->counters(); }
  bool deaf() const override { return inner_->deaf(); }
  Result<transport::Facts> facts(transport::PeerId peer) const override { return inner_->facts(peer); }

 protected:
  transport::Transport& inner() { return *inner_; }

 private:
  std::unique_ptr<transport::Transport> inner_;
};

}  // namespace epd::test
