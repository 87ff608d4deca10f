// A thread of a device, played by its stream's: device code that one thread runs, compiled for the host.
#pragma once

#include "fake_cuda/ordered_by_host.h"
#include "fake_cuda/stream.h"

#include <functional>
#include <string>

namespace epd::fake_cuda {

// Runs `code`. False: it has ended before it was done. The stream is gone, or the device has faulted, maybe
// by an access of the code's to what the device does not reach.
bool play(Stream& stream, const std::string& kernel, const std::function<void()>& code);

// For code that runs now, and later.
void pass_time(std::uint64_t nanoseconds);

}  // namespace epd::fake_cuda
