// Programs that a tool runs.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <sys/types.h>

namespace epd::kit {

struct CommandOptions {
  double seconds = 60;                     // then it is killed
  std::vector<std::string> environment{};  // "NAME=VALUE", beside ours
  std::function<void()> in_child{};        // called before it is executed, in its process
};

struct CommandResult {
  int status = -1;  // as the shell has it: 127: not found, 128 and a signal's number
  std::string out;
  std::string err;
};

// words[0] is looked for in PATH.
CommandResult run_command(const std::vector<std::string>& words, const CommandOptions& options = {});
// Its standard output. Throws ToolError with what it said unless it ended well.
std::string must_run(const std::vector<std::string>& words, const CommandOptions& options = {});
// Whether PATH has it.
bool has_command(const std::string& name);

// Killed by the destructor. What it says is lost.
class BackgroundCommand {
 public:
  explicit BackgroundCommand(const std::vector<std::string>& words, const CommandOptions& options = {});
  ~BackgroundCommand();
  BackgroundCommand(const BackgroundCommand&) = delete;
  BackgroundCommand& operator=(const BackgroundCommand&) = delete;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
};

}  // namespace epd::kit
