// How another thread asks the loop.
#pragma once

#include "common/status.h"
#include "loop.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>

namespace epd::supervisor {

inline constexpr std::chrono::seconds kAnswerTime{2};
inline constexpr std::chrono::milliseconds kLookTime{
    20};  // how often to check whether the caller still waits

namespace asking {

// Either the loop takes a question, or the caller gives it up. So the caller either hears the answer, or
// nothing happens.
enum class Claim { kOpen, kTaken, kGivenUp };

template <typename T>
struct Question {
  std::atomic<Claim> claim{Claim::kOpen};
  std::promise<T> answer;
};

inline bool take(std::atomic<Claim>& claim, Claim how) {
  Claim open = Claim::kOpen;
  return claim.compare_exchange_strong(open, how);
}

template <typename T>
Result<T> answer_of(std::future<T>& future) {
  try {
    return future.get();
  } catch (const std::future_error&) {  // the loop stopped before it came to the question
    return Status(StatusCode::kAborted, "the daemon is stopping");
  } catch (const std::exception& error) {
    return internal_error(std::string("the supervisor could not answer: ") + error.what());
  }
}

// True if the answer is ready before the time is over and before the caller has gone.
template <typename T>
bool wait(std::future<T>& future, const std::function<bool()>& has_gone) {
  const auto due = std::chrono::steady_clock::now() + kAnswerTime;
  while (!has_gone || !has_gone()) {
    const auto until = has_gone ? std::min(due, std::chrono::steady_clock::now() + kLookTime) : due;
    if (future.wait_until(until) == std::future_status::ready) return true;
    if (until == due) return false;
  }
  return false;
}

}  // namespace asking

// Runs `what` on the loop and returns its result. DEADLINE_EXCEEDED after kAnswerTime, or as soon as
// `has_gone` returns true (it is called on this thread): then `what` has not run and never will. INTERNAL if
// it threw. ABORTED if the loop has stopped.
template <typename T>
Result<T> ask(Loop& loop, std::function<T()> what, const std::function<bool()>& has_gone = {}) {
  if (has_gone && has_gone()) return Status(StatusCode::kAborted, "the caller has gone; nothing was done");
  auto question = std::make_shared<asking::Question<T>>();
  std::future<T> future = question->answer.get_future();
  std::weak_ptr<asking::Question<T>> asked = question;
  const bool posted = loop.post([question = std::move(question), what = std::move(what)] {
    if (!asking::take(question->claim, asking::Claim::kTaken)) return;
    try {
      question->answer.set_value(what());
    } catch (...) {
      question->answer.set_exception(std::current_exception());
    }
  });
  if (!posted) return Status(StatusCode::kAborted, "the daemon is stopping");
  if (asking::wait(future, has_gone)) return asking::answer_of(future);
  const auto open = asked.lock();
  if (open != nullptr && asking::take(open->claim, asking::Claim::kGivenUp)) {
    return Status(StatusCode::kDeadlineExceeded, "the supervisor's loop has not answered in time (at most " +
                                                     std::to_string(kAnswerTime.count()) +
                                                     " s); nothing was done, and nothing will be");
  }
  // The loop has taken the question, and answers at once.
  if (future.wait_for(kAnswerTime) == std::future_status::ready) return asking::answer_of(future);
  return Status(StatusCode::kDeadlineExceeded, "the daemon started the request but did not finish within " +
                                                   std::to_string(kAnswerTime.count()) +
                                                   " s; it may still take effect, see: epctl events");
}

}  // namespace epd::supervisor
