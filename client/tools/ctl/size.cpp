#include "commands.h"

#include "format.h"
#include "proto/group_bytes.h"
#include "proto/shape_rules.h"

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace epd::ctl {
namespace {

abi::RowFormat row_format_of(const std::string& word) {
  const std::size_t colon = word.find(':');
  abi::RowFormat format;
  format.payload = static_cast<abi::Payload>(number_of(words_of<v1::Payload>(), word.substr(0, colon)));
  if (colon != std::string::npos)
    format.scale_format =
        static_cast<abi::ScaleFormat>(number_of(words_of<v1::ScaleFormat>(), word.substr(colon + 1)));
  return format;
}

abi::GroupShape shape_of(const SizeArguments& a) {
  abi::GroupShape shape = a.shape;
  shape.num_more_formats = static_cast<std::uint32_t>(a.more_formats.size());
  const std::size_t known = std::min<std::size_t>(a.more_formats.size(), abi::kMaxMoreFormats);
  for (std::size_t i = 0; i < known; ++i) shape.more_formats[i] = row_format_of(a.more_formats[i]);
  return shape;
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
  const auto put_word = [&](const char* field, const std::vector<std::string>& words) {
    group[field] = words[abi::shape_field(field).value(shape)];
  };
  put_word("payload", words_of<v1::Payload>());
  put_word("index_type", words_of<v1::IndexType>());
  put_word("layout", words_of<v1::Layout>());
  put_word("scale_format", words_of<v1::ScaleFormat>());
  put_word("scale_layout", words_of<v1::ScaleLayout>());
  document["device_kind"] = a.device_kind;
  document["rank"] = {{"user_arena_bytes", bytes.user_arena},
                      {"exchange_arena_bytes", bytes.exchange_arena},
                      {"routing_records_bytes", bytes.routing_records},
                      {"inboxes_bytes", bytes.inboxes},
                      {"board_bytes", bytes.board},
                      {"results_bytes", bytes.results},
                      {"total_bytes", bytes.rank},
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
    table.add({name, of, format_bytes(rank), format_bytes(rank * a.shape.num_ranks)});
  };
  add("user arena", device, bytes.user_arena);
  add("exchange arena", device, bytes.exchange_arena);
  add("  routing records", device, bytes.routing_records);
  add("  inboxes", device, bytes.inboxes);
  add("board", "host", bytes.board);
  if (!host) add("results", "host", bytes.results);
  add("all", "", bytes.rank);
  add("max_arena_bytes_per_user", "quota", bytes.rank);
  if (host) add("max_routing_bytes_per_user", "quota", bytes.routing_quota);
  return table.text();
}

std::string region_table(const abi::GroupShape& shape) {
  Table table({{"REGION"}, {"A SLOT", Align::kRight}, {"A RANK", Align::kRight}});
  for (std::size_t i = 0; i < abi::kNumRegions; ++i) {
    const std::uint64_t bytes = abi::region_bytes(shape, static_cast<abi::Region>(i));
    if (bytes == 0) continue;
    table.add({abi::kRegionNames[i], format_bytes(bytes), format_bytes(bytes * shape.depth)});
  }
  return table.text();
}

}  // namespace

std::vector<std::string> row_format_words() {
  return {"bf16", "fp8_cast", "fp8_cast:float32_pow2", "fp8_cast:ue8m0", "fp8", "fp8:ue8m0"};
}

std::uint32_t number_of(const std::vector<std::string>& words, const std::string& word) {
  return static_cast<std::uint32_t>(std::find(words.begin(), words.end(), word) - words.begin());
}

Exit run_size(const Context& context) {
  const SizeArguments& a = context.arguments.size;
  const abi::GroupShape shape = shape_of(a);
  if (const std::string wrong = abi::check_shape(shape); !wrong.empty()) fail_usage(wrong);
  const abi::GroupBytes bytes(shape, a.device_kind == "host");
  return context.answer(json_of(a, shape, bytes), memory_table(a, bytes) + "\n" + region_table(shape));
}

}  // namespace epd::ctl
