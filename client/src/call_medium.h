// How the library reaches the words and the results of calls: on a GPU by the driver, on a host device in
// memory that both share, with a doorbell each way.
#pragma once

#include "device.h"
#include "proto/call_words.h"
#include "proto/session.h"
#include "shared_memory.h"

#include <cstdint>
#include <span>

namespace epd::client {

// abi::Results of a group.
struct ResultsMemory {
  DeviceMemory of_device;  // one of the two
  Mapping of_host;

  std::uintptr_t address() const {
    return of_device.address() != 0 ? of_device.address() : reinterpret_cast<std::uintptr_t>(of_host.bytes());
  }
};

class CallMedium {
 public:
  virtual ~CallMedium() = default;
  virtual Status map_results(const UniqueFd& fd, std::uint64_t bytes, ResultsMemory& out) = 0;
  // Writes a call of the host in its place, and then rings for it.
  virtual Status call(std::uintptr_t place, const abi::PackedCall& call) = 0;
  virtual Status ring(std::uintptr_t bell) = 0;
  virtual Status write(std::uintptr_t word, std::uint32_t value) = 0;
  // Returns when all writes before it are done.
  virtual Status finish() = 0;
  // Reads the words after all earlier writes.
  virtual Status read(std::uintptr_t from, std::span<std::uint32_t> words) = 0;
  // OK, or the error after which nothing runs on the device.
  virtual Status check() = 0;
  // Whether whoever ends a call rings the client.
  virtual bool rings() const = 0;
};

class DeviceMedium final : public CallMedium {
 public:
  explicit DeviceMedium(Device& device) : device_(device) {}

  Status map_results(const UniqueFd& fd, std::uint64_t bytes, ResultsMemory& out) override {
    return device_.map_host(fd, bytes, out.of_device);
  }
  Status call(std::uintptr_t place, const abi::PackedCall& call) override {
    return device_.call(place, call);
  }
  // Behind the copy in the same stream, so the bell comes when the words are there.
  Status ring(std::uintptr_t bell) override { return device_.write_aside(bell, 1); }
  Status write(std::uintptr_t word, std::uint32_t value) override { return device_.write_aside(word, value); }
  Status finish() override { return device_.finish_aside(); }
  Status read(std::uintptr_t from, std::span<std::uint32_t> words) override {
    return device_.read_aside(from, words);
  }
  Status check() override { return device_.check(); }
  bool rings() const override { return false; }

 private:
  Device& device_;
};

class HostMedium final : public CallMedium {
 public:
  HostMedium(const abi::SegmentB& b, const UniqueFd& engine_bell) : b_(b), bell_(engine_bell) {}

  Status map_results(const UniqueFd& fd, std::uint64_t bytes, ResultsMemory& out) override;
  Status call(std::uintptr_t place, const abi::PackedCall& call) override;
  Status ring(std::uintptr_t bell) override;
  Status write(std::uintptr_t word, std::uint32_t value) override;
  Status finish() override { return {}; }
  Status read(std::uintptr_t from, std::span<std::uint32_t> words) override;
  Status check() override { return {}; }
  bool rings() const override { return true; }

 private:
  const abi::SegmentB& b_;
  const UniqueFd& bell_;
};

}  // namespace epd::client
