// epctl size: what a group takes of memory. Asks no daemon.
#pragma once

#include "json.h"

#include <google/protobuf/descriptor.h>
#include <string>
#include <vector>
#include "epd/v1/control.pb.h"

namespace epd::ctl {

// The words for the values of a field, in the order of their numbers: those of the schema's enum, as in JSON.
template <typename Enum>
std::vector<std::string> words_of() {
  std::vector<std::string> words;
  const auto& type = *google::protobuf::GetEnumDescriptor<Enum>();
  for (int i = 1; i < type.value_count(); ++i) words.push_back(enum_word(type, type.value(i)->number()));
  return words;
}
// PAYLOAD or PAYLOAD:SCALE_FORMAT, where float32 is not said.
std::vector<std::string> row_format_words();
std::vector<std::string> region_words();

// Of a word that is one of them.
std::uint32_t number_of(const std::vector<std::string>& words, const std::string& word);

}  // namespace epd::ctl
