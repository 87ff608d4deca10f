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

// `i`: of a repeated field; -1: the field has one value.
Json value_of(const Message& m, const FieldDescriptor& field, int i) {
  const google::protobuf::Reflection& r = *m.GetReflection();
  const FieldDescriptor* const f = &field;
  const bool one = i < 0;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: return one ? r.GetInt32(m, f) : r.GetRepeatedInt32(m, f, i);
    case FieldDescriptor::CPPTYPE_INT64: return one ? r.GetInt64(m, f) : r.GetRepeatedInt64(m, f, i);
    case FieldDescriptor::CPPTYPE_UINT32: return one ? r.GetUInt32(m, f) : r.GetRepeatedUInt32(m, f, i);
    case FieldDescriptor::CPPTYPE_UINT64: return one ? r.GetUInt64(m, f) : r.GetRepeatedUInt64(m, f, i);
    case FieldDescriptor::CPPTYPE_DOUBLE: return one ? r.GetDouble(m, f) : r.GetRepeatedDouble(m, f, i);
    case FieldDescriptor::CPPTYPE_FLOAT: return one ? r.GetFloat(m, f) : r.GetRepeatedFloat(m, f, i);
    case FieldDescriptor::CPPTYPE_BOOL: return one ? r.GetBool(m, f) : r.GetRepeatedBool(m, f, i);
    case FieldDescriptor::CPPTYPE_STRING: return one ? r.GetString(m, f) : r.GetRepeatedString(m, f, i);
    case FieldDescriptor::CPPTYPE_ENUM:
      return enum_word(*field.enum_type(), one ? r.GetEnumValue(m, f) : r.GetRepeatedEnumValue(m, f, i));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return to_json(one ? r.GetMessage(m, f) : r.GetRepeatedMessage(m, f, i));
  }
  return nullptr;
}

}  // namespace

std::string enum_word(const google::protobuf::EnumDescriptor& type, int number) {
  const auto* value = type.FindValueByNumber(number);
  if (value == nullptr) return "unspecified";
  std::string name = value->name().substr(prefix_length(type.name()));
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

Json to_json(const Message& message, const FieldDescriptor& field) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  if (!field.is_repeated()) {
    if (field.has_presence() && !reflection.HasField(message, &field)) return nullptr;
    return value_of(message, field, -1);
  }
  Json list = Json::array();
  std::map<std::string, Json> entries;  // of a map, ordered by key
  for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
    Json value = value_of(message, field, i);
    if (field.is_map()) {
      entries[value["key"]] = std::move(value["value"]);
    } else {
      list.push_back(std::move(value));
    }
  }
  return field.is_map() ? Json(entries) : list;
}

Json to_json(const Message& message) {
  Json object = Json::object();
  const auto& descriptor = *message.GetDescriptor();
  for (int i = 0; i < descriptor.field_count(); ++i)
    object[descriptor.field(i)->name()] = to_json(message, *descriptor.field(i));
  return object;
}

}  // namespace epd::ctl
