// epd.v1.Control over the supervisor's facade.
#pragma once

#include "base/call_times.h"
#include "supervisor/control_facade.h"

#include <atomic>
#include <memory>

namespace grpc {
class Service;
}

namespace epd::control {

class Callers;

// All arguments outlive it. Watches end when `stopping` is set.
std::unique_ptr<grpc::Service> make_control_service(supervisor::ControlFacade& facade, const Callers& callers,
                                                    const std::atomic<bool>& stopping, CallTimes& times);

}  // namespace epd::control
