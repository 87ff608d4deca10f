// The demo's report.
#pragma once

#include "kit/report.h"
#include "plan.h"

#include <string>

namespace epd::demo {

kit::Json make_report(const DemoPlan& plan, const DemoRecords& records);
std::string to_text(const kit::Json& report);

}  // namespace epd::demo
