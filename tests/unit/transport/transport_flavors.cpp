#include "transport_flavors.h"

namespace epd::transport {

std::string name_of(const Flavor& flavor) {
  const char* names[] = {"in_process", "ucx", "ucx_rendezvous", "ucx_shared"};
  return std::string(names[static_cast<int>(flavor.carrier)]) + (flavor.faults ? "_faulty" : "");
}

UcxOptions ucx_options(Carrier carrier, const Limits& limits) {
  UcxOptions options;
  options.devices = "lo";
  options.limits = limits;
  if (carrier != Carrier::kUcx) options.rendezvous_bytes = kTestRendezvousBytes;
  if (carrier == Carrier::kUcxShared) options.transports = "posix,cma";
  return options;
}

std::unique_ptr<Transport> World::open(const Limits& limits) {
  Result<std::unique_ptr<Transport>> made = flavor_.carrier == Carrier::kInProcess
                                                ? network_.open(limits)
                                                : open_ucx(ucx_options(flavor_.carrier, limits));
  EXPECT_TRUE(made.ok()) << made.status().to_string();
  if (!made.ok()) std::abort();
  if (!flavor_.faults) return std::move(made).value();
  FaultRates rates;
  rates.refuse_percent = 5;
  rates.delay_percent = 30;
  rates.late_percent = 30;
  rates.cut_per_mille = 10;
  rates.max_turns = 20;
  return make_faulty(std::move(made).value(), seed_++, rates);
}

}  // namespace epd::transport
