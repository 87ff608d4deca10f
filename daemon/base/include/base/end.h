// The end of the process.
#pragma once

namespace epd {

// Ends the process with `code` in that time, if it does not end by itself before. Starts no thread, for none
// may be left. Lines of the log are written by then. One call for each process.
void end_within(unsigned seconds, int code);

}  // namespace epd
