#include "size.h"

#include "commands.h"
#include "proto/binding_rules.h"
#include "proto/group_bytes.h"
#include "proto/shape_rules.h"
#include "table.h"
#include "units.h"

#include <algorithm>
#include <cstddef>
#include <ostream>
#include <string_view>

namespace epd::ctl {
namespace {

// The grammar takes no other words.
std::uint32_t number_of(const std::vector<std::string>& words, const std::string& word) {
  return static_cast<std::uint32_t>(std::find(words.begin(), words.end(), word) - words.begin());
}

// PAYLOAD or PAYLOAD:SCALE_FORMAT, where float32 is not said.
abi::RowFormat row_format_of(const std::string& word) {
  const std::size_t colon = word.find(':');
  abi::RowFormat format;
  format.payload = static_cast<abi::Payload>(number_of(payload_words(), word.substr(0, colon)));
  if (colon != std::string::npos)
    format.scale_format =
        static_cast<abi::ScaleFormat>(number_of(scale_format_words(), word.substr(colon + 1)));
  return format;
}

abi::GroupShape shape_of(const SizeArguments& a) {
  abi::GroupShape shape{};
  shape.num_ranks = a.ranks;
  shape.num_experts = a.experts;
  shape.max_tokens = a.tokens;
  shape.hidden = a.hidden;
  shape.topk = a.topk;
  shape.depth = a.depth;
  shape.payload = static_cast<abi::Payload>(number_of(payload_words(), a.payload));
  shape.index_type = static_cast<abi::IndexType>(number_of(index_type_words(), a.index_type));
  shape.layout = static_cast<abi::Layout>(number_of(layout_words(), a.layout));
  shape.scale_format = static_cast<abi::ScaleFormat>(number_of(scale_format_words(), a.scale_format));
  shape.scale_layout = static_cast<abi::ScaleLayout>(number_of(scale_layout_words(), a.scale_layout));
  shape.expert_alignment = a.expert_alignment;
  shape.opaque_bytes = a.opaque_bytes;
  shape.num_biases = a.biases;
  shape.num_handles = a.handles;
  shape.max_recv_rows = a.max_recv_rows;
  shape.num_more_formats = static_cast<std::uint32_t>(a.more_formats.size());
  const std::size_t known = std::min<std::size_t>(a.more_formats.size(), abi::kMaxMoreFormats);
  for (std::size_t i = 0; i < known; ++i) shape.more_formats[i] = row_format_of(a.more_formats[i]);
  return shape;
}

std::uint32_t bound_by(const SizeArguments& a) {
  std::uint32_t bound = 0;
  for (const std::string& word : a.bound) bound |= 1u << number_of(region_words(), word);
  return bound;
}

Json json_of(const SizeArguments& a, const abi::GroupShape& shape, const abi::GroupBytes& bytes) {
  Json document;
  Json& group = document["shape"];
  for (const abi::ShapeField& field : abi::kShapeFields) group[field.name] = field.value(shape);
  for (const char* field : {"policy", "sum_ranks", "span", "range_format"})
    group.erase(field);  // have no bearing on it
  for (const abi::ShapeField& field : abi::kShapeFields) {
    if (std::string_view(field.name).find("more_formats") != std::string_view::npos) group.erase(field.name);
  }
  group["more_formats"] = a.more_formats;
  group["payload"] = a.payload;
  group["index_type"] = a.index_type;
  group["layout"] = a.layout;
  group["scale_format"] = a.scale_format;
  group["scale_layout"] = a.scale_layout;
  document["device_kind"] = a.device_kind;
  document["bound"] = a.bound;
  document["rank"] = {{"user_arena_bytes", bytes.user_arena},
                      {"exchange_arena_bytes", bytes.exchange_arena},
                      {"routing_records_bytes", bytes.routing_records},
                      {"inboxes_bytes", bytes.inboxes},
                      {"board_bytes", bytes.board},
                      {"results_bytes", bytes.results},
                      {"total_bytes", bytes.rank},
                      {"arena_quota_bytes", bytes.arena_quota},
                      {"routing_quota_bytes", bytes.routing_quota}};
  document["group"] = {{"total_bytes", bytes.group}};
  Json& regions = document["slot"];
  for (std::size_t i = 0; i < abi::kNumRegions; ++i) {
    const std::uint64_t region = abi::region_bytes(shape, static_cast<abi::Region>(i));
    regions[abi::kRegionNames[i] + std::string("_bytes")] = region;
  }
  return document;
}

std::string memory_table(const SizeArguments& a, const abi::GroupBytes& bytes) {
  const bool host = a.device_kind == "host";
  const std::string device = host ? "host" : "device";
  Table table({{"MEMORY"}, {"OF"}, {"A RANK", Align::kRight}, {"THE GROUP", Align::kRight}});
  const auto add = [&](const std::string& name, const std::string& of, std::uint64_t rank) {
    table.add({name, of, format_bytes(rank), format_bytes(rank * a.ranks)});
  };
  add("user arena", device, bytes.user_arena);
  add("exchange arena", device, bytes.exchange_arena);
  add("  routing records", device, bytes.routing_records);
  add("  inboxes", device, bytes.inboxes);
  add("board", "host", bytes.board);
  if (!host) add("results", "host", bytes.results);
  add("all", "", bytes.rank);
  add("max_arena_bytes_per_user", "quota", bytes.arena_quota);
  if (host) add("max_routing_bytes_per_user", "quota", bytes.routing_quota);
  return table.text();
}

std::string region_table(const abi::GroupShape& shape, std::uint32_t bound) {
  Table table({{"REGION"}, {"A SLOT", Align::kRight}, {"A RANK", Align::kRight}, {"IN"}});
  for (std::size_t i = 0; i < abi::kNumRegions; ++i) {
    const std::uint64_t bytes = abi::region_bytes(shape, static_cast<abi::Region>(i));
    if (bytes == 0) continue;
    table.add({abi::kRegionNames[i], format_bytes(bytes), format_bytes(bytes * shape.depth),
               (bound >> i & 1) != 0 ? "memory of the client's" : "user arena"});
  }
  return table.text();
}

}  // namespace

const std::vector<std::string>& payload_words() {
  static const std::vector<std::string> words{"bf16", "fp8_cast", "fp8", "opaque"};
  return words;
}
const std::vector<std::string>& index_type_words() {
  static const std::vector<std::string> words{"int32", "int64"};
  return words;
}
const std::vector<std::string>& layout_words() {
  static const std::vector<std::string> words{"compact", "packed", "expert"};
  return words;
}
const std::vector<std::string>& scale_format_words() {
  static const std::vector<std::string> words{"float32", "float32_pow2", "ue8m0"};
  return words;
}
const std::vector<std::string>& row_format_words() {
  static const std::vector<std::string> words{"bf16",           "fp8_cast", "fp8_cast:float32_pow2",
                                              "fp8_cast:ue8m0", "fp8",      "fp8:ue8m0"};
  return words;
}
const std::vector<std::string>& scale_layout_words() {
  static const std::vector<std::string> words{"row_major", "column_major"};
  return words;
}
const std::vector<std::string>& device_kind_words() {
  static const std::vector<std::string> words{"host", "cuda"};
  return words;
}
const std::vector<std::string>& region_words() {
  static const std::vector<std::string> words(abi::kRegionNames.begin(), abi::kRegionNames.end());
  return words;
}

Exit run_size(const Arguments& arguments, Output& output) {
  const SizeArguments& a = arguments.size;
  const abi::GroupShape shape = shape_of(a);
  const std::uint32_t bound = bound_by(a);
  std::string wrong = abi::check_shape(shape);
  if (wrong.empty()) wrong = abi::check_bound(shape, bound);
  if (!wrong.empty()) return report(arguments, output, {Exit::kUsage, "INVALID_ARGUMENT", wrong});
  const abi::GroupBytes bytes(shape, a.device_kind == "host", bound);
  if (arguments.json) {
    write_json(output, json_of(a, shape, bytes));
  } else {
    output.out << memory_table(a, bytes) << '\n' << region_table(shape, bound);
  }
  return Exit::kOk;
}

}  // namespace epd::ctl
