#include "support/engine_pages.h"

#include "common/signal.h"
#include "support/census.h"
#include "support/ranks.h"

#include <fcntl.h>
#include <signal.h>
#include <algorithm>
#include <ctime>
#include <stdexcept>
#include <string>

namespace epd::test {
namespace {

constexpr int kPageFd = 4;  // of an engine; daemon/README.md, "Engines"

}  // namespace

EnginePages::EnginePages(const Daemon& daemon) {
  for (std::uint32_t i = 0; i < daemon.devices(); ++i) {
    const std::string path = "/proc/" + std::to_string(daemon.engine(i)) + "/fd/" + std::to_string(kPageFd);
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    Result<Mapping> page = Mapping::map(fd.get(), sizeof(abi::EnginePage), Access::kReadOnly);
    if (!page.ok()) throw std::runtime_error(path + ": " + page.status().to_string());
    pages_.push_back(std::move(*page));
  }
}

bool EnginePages::shows(std::uint32_t device, abi::Op op, abi::OpStage stage) const {
  const auto& ops = of(device).ops;
  return std::any_of(std::begin(ops), std::end(ops), [&](const abi::OpView& view) {
    return view.ticket.load(std::memory_order_acquire) != 0 && view.op == op &&
           view.stage.load(std::memory_order_acquire) == static_cast<std::uint32_t>(stage);
  });
}

bool stop_process(pid_t pid) {
  if (send_signal(pid, SIGSTOP) != 0) return false;
  return eventually(10, [&] {
    const char state = process_state(pid);
    return state == 'T' || state == 't';
  });
}

bool stop_when(pid_t pid, const std::function<bool()>& state, const std::function<bool()>& over,
               double seconds) {
  constexpr timespec kLook{0, 20'000};  // short sleeps: who spins is made to wait when the cores are wanted
  const double end = now_s() + seconds;
  while (!over() && now_s() < end) {
    if (!state()) {
      ::nanosleep(&kLook, nullptr);
      continue;
    }
    if (!stop_process(pid)) return false;
    if (state()) return true;
    send_signal(pid, SIGCONT);
  }
  return false;
}

}  // namespace epd::test
