// The supervisor's views as messages. No gRPC here, no decisions.
#pragma once

#include "common/status.h"
#include "supervisor/control_facade.h"

#include <string>
#include <string_view>
#include <vector>
#include "epd/v1/control.pb.h"

namespace epd {

// Clients choose some of the strings that the views carry. A protobuf string that is not UTF-8 makes the
// whole message unreadable, so every byte that does not belong becomes U+FFFD.
std::string clean_text(std::string_view text);

// The same for a refusal, without the middle of a long one: a caller's own long value, quoted back, would not
// fit into the headers that carry a refusal, and the caller would be told nothing.
std::string refusal_text(std::string_view text);

void translate(const DaemonView& view, v1::DaemonStatus& message);
// Sorted by the key that control.proto names.
void translate(std::vector<DeviceView> views, google::protobuf::RepeatedPtrField<v1::Device>& messages);
void translate(std::vector<SessionView> views, google::protobuf::RepeatedPtrField<v1::Session>& messages);
void translate(std::vector<GroupView> views, google::protobuf::RepeatedPtrField<v1::Group>& messages);
void translate(std::vector<OperationView> views, google::protobuf::RepeatedPtrField<v1::Operation>& messages);
void translate(std::vector<ConfigEntry> views, google::protobuf::RepeatedPtrField<v1::ConfigEntry>& messages);
void translate(const OperationDetail& detail, v1::GetOperationResponse& message);
void translate_histogram(const HistogramView& counts, v1::Histogram& message);
void translate(AllStatisticsView views, v1::GetStatisticsResponse& message);
void translate(const EventBatch& batch, v1::WatchEventsResponse& message);
// What clients of this build must match.
void translate_abi(v1::GetVersionResponse& message);

// The numbers are gRPC's own.
int grpc_code(StatusCode code);
// Serialised ErrorStatus for the trailer.
std::string error_details(const Status& status);

}  // namespace epd
