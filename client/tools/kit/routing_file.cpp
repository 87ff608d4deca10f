#include "kit/error.h"
#include "kit/routing.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <istream>
#include <ostream>

#include <nlohmann/json.hpp>

namespace epd::kit {
namespace {

using Json = nlohmann::json;

std::vector<std::int64_t> numbers_of_json(const std::string& line, const std::string& where) {
  const Json parsed = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  const Json* list = &parsed;
  if (parsed.is_object()) {
    const auto found = parsed.find("topk");
    if (found == parsed.end()) fail(where + ": the object has no list named \"topk\"");
    list = &*found;
  }
  if (!list->is_array()) fail(where + ": not a JSON list of experts");
  std::vector<std::int64_t> numbers;
  for (const Json& item : *list) {
    if (!item.is_number_integer()) fail(where + ": " + item.dump() + " is not an expert's number");
    numbers.push_back(item.get<std::int64_t>());
  }
  return numbers;
}

std::vector<std::int64_t> numbers_of_text(const std::string& line, const std::string& where) {
  std::vector<std::int64_t> numbers;
  std::size_t begin = 0;
  while ((begin = line.find_first_not_of(" ,\t\r", begin)) != std::string::npos) {
    const std::size_t end = std::min(line.find_first_of(" ,\t\r", begin), line.size());
    std::int64_t value = 0;
    const auto [stop, error] = std::from_chars(line.data() + begin, line.data() + end, value);
    if (error != std::errc{} || stop != line.data() + end) {
      fail(where + ": '" + line.substr(begin, end - begin) + "' is not an expert's number");
    }
    numbers.push_back(value);
    begin = end;
  }
  return numbers;
}

}  // namespace

std::vector<std::int32_t> read_routing(std::istream& in, const std::string& name, std::uint32_t num_experts,
                                       std::uint32_t topk) {
  std::vector<std::int32_t> table;
  std::string line;
  for (std::size_t number = 1; std::getline(in, line); ++number) {
    const std::size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos || line[first] == '#') continue;
    const std::string where = name + ":" + std::to_string(number);
    const bool json = line[first] == '[' || line[first] == '{';
    const auto numbers = json ? numbers_of_json(line, where) : numbers_of_text(line, where);
    if (numbers.empty() || numbers.size() > topk) {
      fail(where + ": " + std::to_string(numbers.size()) + " experts; allowed: 1.." + std::to_string(topk) +
           " (topk)");
    }
    for (const std::int64_t value : numbers) {
      if (value >= std::int64_t{num_experts}) {
        fail(where + ": expert " + std::to_string(value) + "; allowed: 0.." +
             std::to_string(num_experts - 1) + ", or a negative number: no selection");
      }
      table.push_back(static_cast<std::int32_t>(std::max<std::int64_t>(value, -1)));
    }
    table.insert(table.end(), topk - numbers.size(), -1);
  }
  if (table.empty()) fail(name + ": no token in it; allowed: at least one line with a top-k list");
  return table;
}

std::vector<std::int32_t> read_routing_file(const std::string& path, std::uint32_t num_experts,
                                            std::uint32_t topk) {
  std::ifstream file(path);
  if (!file) {
    fail("routing '" + path +
         "' is not a file that can be read; allowed: uniform, zipf, group-limited, one-expert, or a path");
  }
  return read_routing(file, path, num_experts, topk);
}

void write_routing_line(std::ostream& out, const RoutingLine& line) {
  Json list = Json::array();
  for (const std::int32_t expert : line.topk) {
    if (expert >= 0) list.push_back(expert);
  }
  const Json object{{"step", line.step}, {"layer", line.layer}, {"rank", line.rank}, {"topk", list}};
  out << object.dump() << '\n';
}

}  // namespace epd::kit
