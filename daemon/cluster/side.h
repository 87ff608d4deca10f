// The common part of the coordinator's daemon and the others: who this node is, and what it sees.
#pragma once

#include "channel.h"
#include "cluster/cluster.h"
#include "membership/agent.h"
#include "refusals.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace epd::cluster {

struct Self {
  const Settings& settings;
  const Clock& clock;
  Refusals& refusals;
  v1::NodeDescription description;  // as at the start: not draining
  membership::Agent& agent;         // its owner ticks it and carries out its actions
};

class Side : public StreamEvents {
 public:
  // A stream that another daemon has opened to this one.
  virtual void on_opened(std::shared_ptr<Stream> stream) = 0;
  virtual void drain() = 0;
  virtual void leave() = 0;
  virtual void tick() = 0;
  virtual std::uint64_t next_due_ns() const = 0;
  virtual View view() const = 0;
  virtual std::vector<SpanningGroup> spanning_groups() const { return {}; }
};

}  // namespace epd::cluster
