// Runs rounds of dispatch and combine on one rank, many in flight, and checks each against the
// specification. All ranks of a group run the same script, which follows from the case.
#pragma once

#include "support/cases.h"
#include "support/client.h"
#include "support/losses.h"
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
  kCached,     // D0 C0 d0 c0 D1 ...: the routing once more, with other data, each C and c on the next slot
  kTraining,   // D0 C0 .. D3 C3 d3 c3 .. d0 c0: four layers forward, then their gradients back; kept handles
};

struct Step {
  enum class Kind { kDispatch, kCached, kCombine };
  Kind kind;
  std::uint32_t slot;
  Round round;
  bool keep = false;  // kDispatch
};
std::vector<Step> make_script(const Case& c, std::uint32_t rounds, Order order);
// num_handles that a script of kTraining needs.
inline std::uint32_t handles_needed(const Case& c) {
  return 4 + c.depth;
}

struct ScriptOptions {
  std::uint32_t rounds = 4;
  Order order = Order::kWindows;
  std::uint64_t first_op = 0;  // number of the group's next operation
  bool recover = false;        // resume and redo after a failure that allows it
  epd_status_t end = EPD_OK;   // the script ends with the first operation or resume that gives this
  // The script ends with a resume that gives one of these, or an operation after which none is allowed.
  std::set<epd_status_t> ends = {};
  // If `recover`: counts the ranks that are done. Until all are, a rank may be asked to redo what it has
  // completed and its peers have not, so nobody leaves before.
  Gate* finished = nullptr;
  std::uint32_t num_finishers = 0;  // 0: all ranks
  std::uint32_t timeout_ms = 20000;
  std::function<void(std::uint64_t)> on_submit = {};    // (operations submitted so far)
  std::function<void(std::uint64_t)> on_complete = {};  // (operations completed with OK so far)
  std::function<void(epd_status_t)> on_failure = {};    // an operation ended with this, or was refused
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
  epd_status_t submit_dispatch(const Step& step, const Input& own, epd_ticket_t& ticket);
  epd_status_t submit_combine(const Step& step, epd_ticket_t& ticket);
  // For an operation with defer: waits until its inputs have been read, and spoils them.
  void spoil_inputs(const InFlight& oldest);
  epd_status_t finish_oldest();
  void check(const Step& step, const epd_result_t& result, const epd_counts_t* counts);
  bool resume(const std::string& why, epd_resume_info_t& info);
  void run_to_end();
  bool redo_for_peers();
  void drain();
  bool recover(epd_status_t status);
  bool is_end(epd_status_t status) const { return status == options_.end || options_.ends.contains(status); }
  void go_back_to(std::size_t step);
  // Gives back the handles that no redo can ask for once `completed` is done.
  void release_handles(std::size_t completed);
  const std::vector<Input>& inputs_of(Round round);
  void check_mask(const std::set<std::uint32_t>& lost) const;
  epd_status_t take_epoch(epd_resume_info_t& info);
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
  std::deque<InFlight> in_flight_;
  struct Routed {
    epd_handle_t handle = 0;
    std::uint32_t num_recv_rows = 0;
    std::size_t dispatch = 0;  // step
    std::size_t last_use = 0;  // step
    bool kept = false;         // the handle is ours to give back
  };
  std::vector<Routed> routed_;  // by routing
  std::map<Round, std::vector<Input>> inputs_;
  Losses losses_;
  ScriptStats stats_;
};

// Attach, join, run a script, leave. Returns the stats as text.
std::string run_case(const std::string& socket, const std::string& device, const std::string& group,
                     const Case& c, std::uint32_t rank, const ScriptOptions& options);

}  // namespace epd::test
