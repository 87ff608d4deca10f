#include "transport_flavors.h"

namespace epd::transport {

std::string name_of(const Flavor& flavor) {
  return std::string(flavor.carrier == Carrier::kUcx ? "ucx" : "in_process") +
         (flavor.faults ? "_faulty" : "");
}

UcxOptions loopback(const Limits& limits) {
  UcxOptions options;
  options.devices = "lo";
  options.limits = limits;
  return options;
}

std::unique_ptr<Transport> World::open(const Limits& limits) {
  Result<std::unique_ptr<Transport>> made =
      flavor_.carrier == Carrier::kUcx ? open_ucx(loopback(limits)) : network_.open(limits);
  EXPECT_TRUE(made.ok()) << made.status().to_string();
  if (!made.ok()) std::abort();
  if (!flavor_.faults) return std::move(made).value();
  FaultRates rates;
  rates.refuse_percent = 5;
  rates.delay_percent = 30;
  rates.late_percent = 30;
  rates.cut_per_mille = 10;
  rates.max_turns = 20;
  auto faulty = make_faulty(std::move(made).value(), seed_++, rates);
  std::printf("%s\n", faulty->describe().c_str());
  return faulty;
}

}  // namespace epd::transport
