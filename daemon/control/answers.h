#pragma once

#include "base/utf8.h"
#include "common/status.h"

#include <grpcpp/support/status.h>
#include <string>
#include <string_view>

namespace google::protobuf {
class Message;
}

namespace epd::control {

// Texts that are sent. Clients choose some of them, and a protobuf string that is not UTF-8 makes the whole
// message unreadable. No gRPC here.

// clean_text for a refusal, which also shortens a long one in the middle. A long value of the caller, quoted,
// would not fit into the headers of a refusal, and the caller would get no text.
std::string refusal_text(std::string_view text);

// clean_text for every string of a message and of its messages.
void clean_strings(google::protobuf::Message& message);

// Converts epd's status to gRPC's, with epd's own name in the trailer.
grpc::Status to_grpc(const Status& status);
// "NOT_FOUND"
std::string_view code_name(grpc::StatusCode code);

}  // namespace epd::control
