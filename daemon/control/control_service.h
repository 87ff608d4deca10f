// epd.v1.Control over the supervisor's facade.
#pragma once

#include "supervisor/control_facade.h"

#include <memory>

namespace grpc {
class Service;
}

namespace epd {

// `facade` must outlive it.
std::unique_ptr<grpc::Service> make_control_service(ControlFacade& facade);

}  // namespace epd
