// Asking the loop from another thread.
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
inline constexpr std::chrono::milliseconds kLookTime{20};  // at whether the caller is still there

namespace asking {

// A question belongs to one of two: the loop takes it, or the caller gives it up. So a caller either hears
// what came of it, or it does not happen.
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

// True if it is ready before the time is over, and before the caller has gone.
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

// Waits for what `what` returns on the loop. DEADLINE_EXCEEDED after kAnswerTime, or as soon as `has_gone`
// says so (asked from this thread): then `what` has not run, and will not. INTERNAL if it threw; ABORTED if
// the loop has stopped.
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
  // The loop has it in hand, which takes it no time.
  if (future.wait_for(kAnswerTime) == std::future_status::ready) return asking::answer_of(future);
  return Status(StatusCode::kDeadlineExceeded, "the supervisor's loop has begun and not ended within " +
                                                   std::to_string(kAnswerTime.count()) +
                                                   " s; epctl events will tell what came of it");
}

}  // namespace epd::supervisor
