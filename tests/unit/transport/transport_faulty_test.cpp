// Transports with faults.
#include "transport_flavors.h"

namespace epd::transport {
namespace {

// Everything at once, peers that go down too: the ends hold it against the contract, and nothing stands
// still.
TEST(Faulty, AnythingAtRandomOverBoth) {
  const std::uint64_t seed = test_seed();
  for (Carrier carrier : {Carrier::kInProcess, Carrier::kUcx}) {
    std::mt19937_64 random(seed);
    FaultRates rates;
    rates.refuse_percent = 10;
    rates.delay_percent = 40;
    rates.late_percent = 40;
    rates.cut_per_mille = 20;
    rates.down_per_mille = 10;
    rates.max_turns = 30;
    World world({carrier, false}, seed);
    End a(make_faulty(world.open(), seed, rates), 1);
    End b(make_faulty(world.open(), seed + 1, rates), 2);
    for (int round = 0; round < 15; ++round) {
      SCOPED_TRACE(std::to_string(seed) + ", round " + std::to_string(round));
      const PeerId to_b = a.connect(b);
      const PeerId to_a = b.connect(a);
      for (int i = 0; i < 150; ++i) {
        (void)a.send(to_b, random() % 40000);
        (void)b.send(to_a, random() % 40000);
        if (random() % 5 == 0) (void)a.flush(to_b);
        if (random() % 2 == 0) (random() % 2 == 0 ? a : b).turn();
      }
      ASSERT_TRUE(run_until({&a, &b}, [&] { return a.unsettled() + b.unsettled() == 0; }));
      ASSERT_TRUE(a.close(to_b).ok());
      ASSERT_TRUE(b.close(to_a).ok());
      ASSERT_TRUE(run_until({&a, &b}, [&] { return a.unsettled() + b.unsettled() == 0; }));
    }
    EXPECT_GT(a.sent_ok(), 0u);
    EXPECT_GT(a.sent_aborted() + b.sent_aborted(), 0u);
  }
}

}  // namespace
}  // namespace epd::transport
