// Kill points without a line in the code that is killed: a process asks to be traced for a stretch of its
// work, and its parent kills it at the n-th stop. A stop is the moment before or after one of the system
// calls that others can see something of; walking n = 0, 1, 2, ... until a run gets through hits every one of
// them.
#pragma once

#include <sys/types.h>
#include <functional>
#include <optional>
#include <string>

namespace epd::test {

// In the process that is to be killed, around the stretch. Its parent must call kill_at().
void begin_stretch();
void end_stretch();

// In its parent, on the thread that forked it: runs the process to the n-th stop of its stretch and kills it
// there. Returns the stop's name, as "before recvmsg #2", numbers counted within the stretch. Nothing: the
// stretch was over first and the process runs on, or it ended by itself. Does not reap.
std::optional<std::string> kill_at(pid_t pid, int n, double seconds = 20);

// The same at the stop of that name. Returns whether the process came by it.
bool kill_at(pid_t pid, const std::string& name, double seconds = 20);

// For a process that knows nothing of it, a child of the caller: traces its first thread from now on, and
// kills it at its n-th stop. Nothing: `over` became true first, and it runs on untraced.
std::optional<std::string> kill_unasked(pid_t pid, int n, const std::function<bool()>& over,
                                        double seconds = 20);

}  // namespace epd::test
