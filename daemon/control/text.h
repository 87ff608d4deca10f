// Texts on their way out. Clients choose some of them, and a protobuf string that is not UTF-8 makes the
// whole message unreadable. No gRPC here.
#pragma once

#include "base/utf8.h"

#include <string>
#include <string_view>

namespace google::protobuf {
class Message;
}

namespace epd {

// clean_text for a refusal, without the middle of a long one: a caller's own long value, quoted back, would
// not fit into the headers that carry a refusal, and the caller would be told nothing.
std::string refusal_text(std::string_view text);

// The same as clean_text, for every string of a message and of the messages in it.
void clean_strings(google::protobuf::Message& message);

}  // namespace epd
