// Text of who has waited for whom.
#include "json.h"
#include "render.h"
#include "table.h"
#include "units.h"

#include <algorithm>
#include <map>

namespace epd::ctl {
namespace {

constexpr Align kRight = Align::kRight;
constexpr int kMatrixRanks = 16;         // more do not fit in a line
constexpr std::size_t kPairsShown = 20;  // of a larger group

std::string time_of(std::uint64_t us) {
  return us == 0 ? "" : format_us(us);
}

std::string rank_table(const v1::GroupWaits& group) {
  Table table({{"RANK", kRight},
               {"DEVICE"},
               {"OPERATIONS", kRight},
               {"LAST", kRight},
               {"ROWS", kRight},
               {"WAITED", kRight},
               {"WAITED FOR", kRight},
               {"READY", kRight},
               {"ARRIVED", kRight}});
  for (const v1::RankWaits& rank : group.ranks()) {
    // Of a rank elsewhere nothing of its own is known here.
    const auto own = [&](std::uint64_t count) { return rank.device().empty() ? "" : std::to_string(count); };
    table.add({std::to_string(rank.rank()), rank.device(), own(rank.operations()), own(rank.last_arrivals()),
               own(rank.rows()), time_of(rank.waited_us()),
               time_of(rank.waited_for_ready_us() + rank.waited_for_arrived_us()),
               time_of(rank.waited_for_ready_us()), time_of(rank.waited_for_arrived_us())});
  }
  return table.text();
}

std::string matrix(const v1::GroupWaits& group) {
  std::vector<Column> columns = {{"RANK", kRight}};
  for (const v1::RankWaits& peer : group.ranks())
    columns.push_back({"FOR " + std::to_string(peer.rank()), kRight});
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint64_t> waits;
  for (const v1::PairWait& pair : group.pairs())
    waits[{pair.rank(), pair.peer()}] = pair.ready_us() + pair.arrived_us();
  Table table(std::move(columns));
  for (const v1::RankWaits& rank : group.ranks()) {
    std::vector<std::string> cells = {std::to_string(rank.rank())};
    for (const v1::RankWaits& peer : group.ranks())
      cells.push_back(time_of(waits[{rank.rank(), peer.rank()}]));
    table.add(std::move(cells));
  }
  return table.text();
}

std::string longest_pairs(const v1::GroupWaits& group) {
  std::vector<v1::PairWait> pairs(group.pairs().begin(), group.pairs().end());
  std::stable_sort(pairs.begin(), pairs.end(), [](const v1::PairWait& a, const v1::PairWait& b) {
    return a.ready_us() + a.arrived_us() > b.ready_us() + b.arrived_us();
  });
  const std::uint64_t all = pairs.size() + group.pairs_left_out();
  pairs.resize(std::min(pairs.size(), kPairsShown));
  Table table({{"RANK", kRight}, {"WAITED FOR", kRight}, {"READY", kRight}, {"ARRIVED", kRight}});
  for (const v1::PairWait& pair : pairs) {
    table.add({std::to_string(pair.rank()), std::to_string(pair.peer()), time_of(pair.ready_us()),
               time_of(pair.arrived_us())});
  }
  const std::uint64_t left_out = all - pairs.size();
  return table.text() +
         (left_out == 0 ? "" : std::to_string(left_out) + " pairs of ranks waited less; --json has more\n");
}

}  // namespace

std::string render(const v1::GetWaitsResponse& waits) {
  if (waits.groups().empty()) return "there are no groups\n";
  std::string text;
  for (const v1::GroupWaits& group : waits.groups()) {
    text += (text.empty() ? "" : "\n");
    text += "group " + std::to_string(group.group_id()) + " (" + printable(group.name()) + ")\n";
    text += rank_table(group);
    if (group.pairs().empty()) continue;
    text += "\n" + (group.ranks_size() <= kMatrixRanks ? matrix(group) : longest_pairs(group));
  }
  return text;
}

}  // namespace epd::ctl
