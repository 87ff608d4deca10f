// How the checks of an operation's results end in a report.
#pragma once

#include "samples.h"

namespace epd::bench {

// Adds what the checks of all ranks have found. `report.correct` is true before the first call.
template <typename AnyReport>
void add_verdicts(const OperationSamples& samples, AnyReport& report) {
  for (const Verdict& verdict : samples.verdicts.span()) {
    report.checks += verdict.checks;
    if (verdict.failures == 0) continue;
    if (report.correct) report.first_difference = verdict.first;
    report.correct = false;
  }
}

}  // namespace epd::bench
