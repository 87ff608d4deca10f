#include "json.h"

#include <google/protobuf/descriptor.h>
#include <cctype>
#include <map>

namespace epd::ctl {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// Values of the enum DeviceState begin with DEVICE_STATE.
std::size_t prefix_length(const std::string& type_name) {
  std::size_t length = type_name.size() + 1;
  for (std::size_t i = 1; i < type_name.size(); ++i)
    if (std::isupper(static_cast<unsigned char>(type_name[i])) != 0) ++length;
  return length;
}

Json element(const Message& message, const FieldDescriptor& field, int index) {
  const auto& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: return reflection.GetRepeatedInt32(message, &field, index);
    case FieldDescriptor::CPPTYPE_INT64: return reflection.GetRepeatedInt64(message, &field, index);
    case FieldDescriptor::CPPTYPE_UINT32: return reflection.GetRepeatedUInt32(message, &field, index);
    case FieldDescriptor::CPPTYPE_UINT64: return reflection.GetRepeatedUInt64(message, &field, index);
    case FieldDescriptor::CPPTYPE_DOUBLE: return reflection.GetRepeatedDouble(message, &field, index);
    case FieldDescriptor::CPPTYPE_FLOAT: return reflection.GetRepeatedFloat(message, &field, index);
    case FieldDescriptor::CPPTYPE_BOOL: return reflection.GetRepeatedBool(message, &field, index);
    case FieldDescriptor::CPPTYPE_STRING: return reflection.GetRepeatedString(message, &field, index);
    case FieldDescriptor::CPPTYPE_ENUM:
      return enum_word(*field.enum_type(), reflection.GetRepeatedEnumValue(message, &field, index));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return to_json(reflection.GetRepeatedMessage(message, &field, index));
  }
  return nullptr;
}

Json single(const Message& message, const FieldDescriptor& field) {
  const auto& reflection = *message.GetReflection();
  if (field.has_presence() && !reflection.HasField(message, &field)) return nullptr;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: return reflection.GetInt32(message, &field);
    case FieldDescriptor::CPPTYPE_INT64: return reflection.GetInt64(message, &field);
    case FieldDescriptor::CPPTYPE_UINT32: return reflection.GetUInt32(message, &field);
    case FieldDescriptor::CPPTYPE_UINT64: return reflection.GetUInt64(message, &field);
    case FieldDescriptor::CPPTYPE_DOUBLE: return reflection.GetDouble(message, &field);
    case FieldDescriptor::CPPTYPE_FLOAT: return reflection.GetFloat(message, &field);
    case FieldDescriptor::CPPTYPE_BOOL: return reflection.GetBool(message, &field);
    case FieldDescriptor::CPPTYPE_STRING: return reflection.GetString(message, &field);
    case FieldDescriptor::CPPTYPE_ENUM:
      return enum_word(*field.enum_type(), reflection.GetEnumValue(message, &field));
    case FieldDescriptor::CPPTYPE_MESSAGE: return to_json(reflection.GetMessage(message, &field));
  }
  return nullptr;
}

// map<string, ...>, ordered by key.
Json map_object(const Message& message, const FieldDescriptor& field) {
  const auto& reflection = *message.GetReflection();
  std::map<std::string, Json> ordered;
  for (int k = 0; k < reflection.FieldSize(message, &field); ++k) {
    const Message& entry = reflection.GetRepeatedMessage(message, &field, k);
    const auto& descriptor = *entry.GetDescriptor();
    ordered[entry.GetReflection()->GetString(entry, descriptor.map_key())] =
        single(entry, *descriptor.map_value());
  }
  Json object = Json::object();
  for (auto& [key, value] : ordered) object[key] = std::move(value);
  return object;
}

}  // namespace

std::string enum_word(const google::protobuf::EnumDescriptor& type, int number) {
  const auto* value = type.FindValueByNumber(number);
  if (value == nullptr) return "unspecified";
  std::string name = value->name().substr(prefix_length(type.name()));
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

Json to_json(const Message& message) {
  Json object = Json::object();
  const auto& descriptor = *message.GetDescriptor();
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor& field = *descriptor.field(i);
    if (!field.is_repeated()) {
      object[field.name()] = single(message, field);
      continue;
    }
    if (field.is_map()) {
      object[field.name()] = map_object(message, field);
      continue;
    }
    Json list = Json::array();
    const int size = message.GetReflection()->FieldSize(message, &field);
    for (int k = 0; k < size; ++k) list.push_back(element(message, field, k));
    object[field.name()] = std::move(list);
  }
  return object;
}

}  // namespace epd::ctl
