// The page that this engine publishes: counters, the operations in flight, and whether it sleeps.
#pragma once

#include "common/memory.h"
#include "proto/link.h"

namespace epd::engine {

class Page {
 public:
  explicit Page(Mapping mapping) : mapping_(std::move(mapping)), page_(mapping_.as<abi::EnginePage>()) {}
  // A new engine begins everything anew.
  void start(std::uint32_t sms);

  abi::EnginePage& operator*() const { return *page_; }
  abi::EnginePage* operator->() const { return page_; }

  // Entry for one operation, or null if the table is full (the operation then simply isn't shown).
  abi::OpView* claim(const abi::Submission& submission);
  static void release(abi::OpView* view);
  // Nothing is shown if `view` is null. Whom it waits for is of the stage.
  static void enter(abi::OpView* view, abi::OpStage stage, std::uint64_t now_ns);
  static void wait_for(abi::OpView* view, std::uint32_t rank, std::uint64_t now_ns);

  // A resident kernel has stopped, so long after it was told to.
  void kernel_stopped(std::uint32_t us);

 private:
  Mapping mapping_;
  abi::EnginePage* page_;
};

// By which others wake this engine's loop.
class Bell {
 public:
  Bell(UniqueFd fd, Page& page) : fd_(std::move(fd)), page_(page) {}

  // From any thread: something that the loop waits for has happened.
  void ring();
  // By the loop: takes the rings that have come.
  void take();
  int fd() const { return fd_.get(); }

 private:
  const UniqueFd fd_;
  Page& page_;
};

using abi::count;

}  // namespace epd::engine
