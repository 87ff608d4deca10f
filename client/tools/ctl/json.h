// Messages as JSON: field names are the proto's, every field is present, 64-bit numbers are numbers,
// enumerators are lower-case words without their type ("DEVICE_STATE_READY" is "ready").
#pragma once

#include <google/protobuf/generated_enum_reflection.h>
#include <google/protobuf/message.h>
#include <nlohmann/json.hpp>
#include <string>

namespace epd::ctl {

using Json = nlohmann::ordered_json;

Json to_json(const google::protobuf::Message& message);
// One field; null if it is absent.
Json to_json(const google::protobuf::Message& message, const google::protobuf::FieldDescriptor& field);

// A number that the schema lacks is "unspecified", as control.proto says.
std::string enum_word(const google::protobuf::EnumDescriptor& type, int number);

template <typename Enum>
std::string word(Enum value) {
  return enum_word(*google::protobuf::GetEnumDescriptor<Enum>(), static_cast<int>(value));
}

}  // namespace epd::ctl
