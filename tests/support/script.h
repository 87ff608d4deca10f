// Runs rounds of dispatch and combine on one rank, many in flight, and checks each against the
// specification. All ranks of a group run the same script, which follows from the case.
#pragma once

#include "support/cases.h"
#include "support/client.h"
#include "support/ranks.h"

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace epd::test {

enum class Order {
  kInTurn,     // D0 C0 D1 C1 ...
  kWindows,    // D0 .. Dn C0 .. Cn, n = depth
  kStaggered,  // D0 D1 C0 D2 C1 ...
};

struct Step {
  bool dispatch;
  std::uint32_t slot;
  std::uint64_t round;
};
std::vector<Step> make_script(const Case& c, std::uint32_t rounds, Order order);

struct ScriptOptions {
  std::uint32_t rounds = 4;
  Order order = Order::kWindows;
  std::uint64_t first_op = 0;  // number of the group's next operation
  bool recover = false;        // resume and redo after a failure that allows it
  epd_status_t end = EPD_OK;   // the script ends with the first operation or resume that gives this
  // With `recover`: counts the ranks that are done. Until all are, a rank may be asked to redo what it
  // has completed and its peers have not, so nobody leaves before.
  Gate* finished = nullptr;
  std::uint32_t num_finishers = 0;  // 0: all ranks
  std::uint32_t timeout_ms = 20000;
  std::function<void(std::uint64_t)> on_submit;    // (operations submitted so far)
  std::function<void(std::uint64_t)> on_complete;  // (operations completed with OK so far)
  std::function<void(epd_status_t)> on_failure;    // an operation ended with this
};

struct ScriptStats {
  std::uint64_t completed = 0;                    // with OK and the right bytes
  std::map<std::string, std::uint64_t> failures;  // status name -> operations
  std::uint64_t resumes = 0;
  std::vector<std::uint64_t> digests;  // in order of completion
  std::string to_string() const;
};

class ScriptRunner {
 public:
  ScriptRunner(const Group& group, const Case& c, std::uint32_t rank, ScriptOptions options);
  // Throws RankFailure with the case, the step and the difference.
  ScriptStats run();

 private:
  struct InFlight {
    std::size_t step;
    epd_ticket_t ticket;
  };

  bool can_submit() const;
  epd_status_t submit(std::size_t step);
  epd_status_t finish_oldest();
  void check(const Step& step, const epd_result_t& result, const epd_counts_t* counts);
  bool resume(const std::string& why, epd_resume_info_t& info);
  void run_to_end();
  bool redo_for_peers();
  void drain();
  bool recover(epd_status_t status);
  const std::vector<Input>& inputs_of(std::uint64_t round);
  void learn_losses(std::uint64_t epoch);
  std::size_t dispatch_of(std::uint64_t round) const;
  std::string check_degraded_combine(const Step& step, const epd_result_t& result);
  void check_dropped(const Step& step, const Input& own, const epd_result_t& result) const;
  std::uint32_t num_finishers() const {
    return options_.num_finishers != 0 ? options_.num_finishers : case_.num_ranks;
  }
  std::string at(std::size_t step) const;

  const Group& group_;
  const Case case_;
  const std::uint32_t rank_;
  const ScriptOptions options_;
  const std::vector<Step> script_;
  std::size_t next_ = 0;
  std::uint64_t epoch_ = 0;
  std::deque<InFlight> in_flight_;
  std::vector<epd_handle_t> handles_;  // of the dispatch, per round
  std::vector<std::uint32_t> rows_;    // received, per round
  std::map<std::uint64_t, std::vector<Input>> inputs_;
  std::set<std::uint32_t> lost_;                              // now
  std::map<std::uint64_t, std::set<std::uint32_t>> lost_at_;  // round -> when it was dispatched
  std::map<std::uint64_t, std::set<std::uint32_t>>
      lost_since_;                    // round -> after that, if they came back or not
  std::set<std::uint64_t> doubtful_;  // rounds since when epochs have passed that this rank has not seen
  ScriptStats stats_;
};

// Attach, join, run a script, leave. Returns the stats as text.
std::string run_case(const std::string& socket, const std::string& device, const std::string& group,
                     const Case& c, std::uint32_t rank, const ScriptOptions& options);

}  // namespace epd::test
