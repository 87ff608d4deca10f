#include "text.h"

#include <google/protobuf/message.h>
#include <vector>

namespace epd {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// Length of the well-formed UTF-8 sequence that `text` begins with; 0 if there is none.
std::size_t sequence_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xc0u) != 0x80u) return 0;
  const unsigned second = byte(1);
  const bool overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
  const bool outside = (first == 0xed && second > 0x9f) || (first == 0xf4 && second > 0x8f);
  return overlong || outside ? 0 : length;
}

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

std::string clean_text(std::string_view text) {
  std::string clean;
  clean.reserve(text.size());
  while (!text.empty()) {
    const std::size_t length = sequence_length(text);
    if (length == 0) {
      clean += "\xef\xbf\xbd";
    } else {
      clean += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return clean;
}

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

}  // namespace epd
