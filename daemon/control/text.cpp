#include "text.h"

#include "base/utf8.h"

#include <google/protobuf/message.h>
#include <vector>

namespace epd::control {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

void clean_string(Message& message, const FieldDescriptor* field) {
  const Reflection& reflection = *message.GetReflection();
  std::string scratch;
  if (!field->is_repeated()) {
    const std::string& text = reflection.GetStringReference(message, field, &scratch);
    if (std::string clean = clean_text(text); clean != text)
      reflection.SetString(&message, field, std::move(clean));
    return;
  }
  for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
    const std::string& text = reflection.GetRepeatedStringReference(message, field, i, &scratch);
    if (std::string clean = clean_text(text); clean != text)
      reflection.SetRepeatedString(&message, field, i, std::move(clean));
  }
}

}  // namespace

std::string refusal_text(std::string_view text) {
  constexpr std::size_t kEachEnd = 400;
  if (text.size() <= 2 * kEachEnd) return clean_text(text);
  return clean_text(text.substr(0, kEachEnd)) + " ... (" + std::to_string(text.size()) + " bytes) ... " +
         clean_text(text.substr(text.size() - kEachEnd));
}

void clean_strings(Message& message) {
  const Reflection& reflection = *message.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->type() == FieldDescriptor::TYPE_STRING) clean_string(message, field);
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    if (!field->is_repeated()) {
      clean_strings(*reflection.MutableMessage(&message, field));
      continue;
    }
    for (int i = 0; i < reflection.FieldSize(message, field); ++i)
      clean_strings(*reflection.MutableRepeatedMessage(&message, field, i));
  }
}

}  // namespace epd::control
