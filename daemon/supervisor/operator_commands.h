// The commands of operators: rights, settings of devices and groups, evictions, restarts of engines. See
// ControlFacade.
#pragma once

#include "gpu_work.h"
#include "lifecycle.h"
#include "membership/group.h"
#include "operator_settings.h"
#include "orders.h"
#include "rooms.h"
#include "supervisor/control_facade.h"

#include <cstdint>
#include <string>

namespace epd::supervisor {

class OperatorCommands {
 public:
  struct Parts {
    Orders& orders;
    OperatorSettings& settings;
    GpuWork& gpu_work;
    const Lifecycle& lifecycle;
  };
  OperatorCommands(const Rooms& rooms, const Parts& parts) : rooms_(rooms), parts_(parts) {}

  Status authorize(const Operator& by, Right wanted, const std::string& what);  // from any thread
  Status set_device(const Operator& by, const std::string& name, std::optional<std::uint32_t> sms);
  // Both return the group that was meant.
  Result<membership::GroupLabel> set_group(const Operator& by, const std::string& name,
                                           const GroupSettingsChange& change);
  Result<membership::GroupLabel> evict_rank(const Operator& by, const std::string& name, std::uint32_t rank,
                                            const std::string& reason);
  Status evict_session(const Operator& by, std::uint64_t session_id, const std::string& reason);
  Status restart_device(const Operator& by, const std::string& name);
  // Accepts the names and ids that SetGroupRequest allows. Users choose names, so none of them hides an id.
  Result<const membership::Group*> find_group(const std::string& text) const;

 private:
  Result<std::uint32_t> find_device(const std::string& name) const;

  const Rooms& rooms_;
  const Parts parts_;
};

}  // namespace epd::supervisor
