#include "support/losses.h"

#include <algorithm>
#include <iterator>

namespace epd::test {
namespace {

std::string dropped_text(std::uint32_t got, std::uint32_t wanted) {
  return got == wanted ? "" : std::to_string(got) + " selections dropped, not " + std::to_string(wanted);
}

bool untouched(const void* region, std::size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(region);
  return std::all_of(p, p + bytes, [](unsigned char byte) { return byte == kPoison; });
}

}  // namespace

void Losses::begin_epoch(std::uint64_t epoch, const Ranks& lost) {
  const bool missed = epoch > epoch_ + 1;
  epoch_ = epoch;
  lost_ = lost;
  for (auto& [routing, known] : known_) {
    known.doubtful |= missed;
    std::copy_if(lost.begin(), lost.end(), std::inserter(known.since, known.since.end()),
                 [&known](std::uint32_t rank) { return !known.at.contains(rank); });
  }
}

void Losses::make_routing(std::uint64_t routing) {
  known_[routing] = {lost_, {}, false};
}

std::vector<Input> Losses::dispatched(std::uint64_t routing, const std::vector<Input>& all) const {
  const auto found = known_.find(routing);
  return without_ranks(case_, all, found != known_.end() ? found->second.at : Ranks{rank_});
}

std::string Losses::check_dropped(std::uint64_t routing, const std::vector<Input>& all,
                                  std::uint32_t num_dropped) const {
  const auto found = known_.find(routing);
  if (found == known_.end()) return dropped_text(num_dropped, 0);
  Ranks dropped = found->second.at;
  dropped.insert(found->second.since.begin(), found->second.since.end());
  return dropped_text(num_dropped, selections_of(case_, all[rank_], dropped));
}

std::string Losses::check_combine(const epd_buffers_t& buffers, Round round, const std::vector<Input>& all,
                                  std::uint32_t num_dropped) {
  const auto found = known_.find(round.routing);
  if (found == known_.end()) return check_newcomers_combine(buffers, num_dropped);
  if (found->second.doubtful) return check_doubtful_combine(found->second, buffers, round, all, num_dropped);
  const std::string text = check_dropped(round.routing, all, num_dropped);
  if (!text.empty()) return text;
  const std::vector<Input> inputs = dispatched(round.routing, all);
  return test::check_combine(case_, buffers, inputs, rank_, round, found->second.since);
}

// It has no tokens of it, whatever has become of the others.
std::string Losses::check_newcomers_combine(const epd_buffers_t& buffers, std::uint32_t num_dropped) const {
  const abi::GroupShape shape = case_.shape();
  if (num_dropped != 0) return dropped_text(num_dropped, 0) + ", of a dispatch before the rank's time";
  if (untouched(buffers.out, abi::region_bytes(shape, abi::Region::kOut)) &&
      untouched(buffers.out_weights, abi::region_bytes(shape, abi::Region::kOutWeights)))
    return "";
  return "the combine of a dispatch before the rank's time wrote to the outputs";
}

// Ranks may have been lost and come back before this one looked; they, too, hold nothing of what they were
// sent. Then the result must be right for some such set of ranks, and the number of dropped selections that
// set's.
std::string Losses::check_doubtful_combine(Known& known, const epd_buffers_t& buffers, Round round,
                                           const std::vector<Input>& all, std::uint32_t num_dropped) const {
  const std::vector<Input> inputs = without_ranks(case_, all, known.at);
  for (std::uint32_t mask = 0; mask < (1u << case_.num_ranks); ++mask) {
    Ranks since = known.since;
    for (std::uint32_t rank = 0; rank < case_.num_ranks; ++rank) {
      if ((mask >> rank & 1) != 0 && rank != rank_ && !known.at.contains(rank)) since.insert(rank);
    }
    Ranks dropped = known.at;
    dropped.insert(since.begin(), since.end());
    if (selections_of(case_, all[rank_], dropped) != num_dropped) continue;
    if (!test::check_combine(case_, buffers, inputs, rank_, round, since).empty()) continue;
    known.since = since;
    return "";
  }
  return "right for no set of ranks that may have been replaced; selections dropped: " +
         std::to_string(num_dropped);
}

}  // namespace epd::test
