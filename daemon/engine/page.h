// The page that this engine publishes: counters, the operations in flight, and whether the engine sleeps.
#pragma once

#include "common/memory.h"
#include "proto/call_words.h"
#include "proto/link.h"

namespace epd::engine {

class Page {
 public:
  explicit Page(Mapping mapping) : mapping_(std::move(mapping)), page_(mapping_.as<abi::EnginePage>()) {}
  // Clears everything that a former engine has left.
  void start(std::uint32_t sms);

  abi::EnginePage& operator*() const { return *page_; }
  abi::EnginePage* operator->() const { return page_; }

  // An entry for one operation, or null if the table is full. Then the operation is not shown.
  abi::OpView* claim(const abi::Call& call, std::uint64_t id, std::uint64_t now_ns);
  static void release(abi::OpView* view);
  // Shows nothing if `view` is null. The awaited rank belongs to the stage.
  static void enter(abi::OpView* view, abi::OpStage stage, std::uint64_t now_ns);
  static void wait_for(abi::OpView* view, std::uint32_t rank, std::uint64_t now_ns);

 private:
  Mapping mapping_;
  abi::EnginePage* page_;
};

// The bell by which others wake this engine's loop.
class Bell {
 public:
  Bell(UniqueFd fd, Page& page) : fd_(std::move(fd)), page_(page) {}

  // From any thread: something that the loop waits for has happened.
  void ring();
  // For the loop: takes the rings that have come.
  void take();
  int fd() const { return fd_.get(); }

 private:
  const UniqueFd fd_;
  Page& page_;
};

using abi::count;

}  // namespace epd::engine
