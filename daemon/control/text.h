// Texts that are sent. Clients choose some of them, and a protobuf string that is not UTF-8 makes the whole
// message unreadable. No gRPC here.
#pragma once

#include "base/utf8.h"

#include <string>
#include <string_view>

namespace google::protobuf {
class Message;
}

namespace epd::control {

// clean_text for a refusal, which also shortens a long one in the middle. A long value of the caller, quoted,
// would not fit into the headers of a refusal, and the caller would get no text.
std::string refusal_text(std::string_view text);

// clean_text for every string of a message and of its messages.
void clean_strings(google::protobuf::Message& message);

}  // namespace epd::control
