// Operations that name memory of the caller's own (epd_memory_t): results bit for bit, whatever regions are
// named, wherever they lie; and nothing else is written to.
#include "conformance.h"
#include "support/caller_memory.h"
#include "support/cuda_memory.h"
#include "support/own_memory.h"

#include <sys/mman.h>
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <random>

namespace epd::test {
namespace {

using abi::Region;
using Bytes = std::vector<std::byte>;

// Memory of a GPU that is registered, and handed out once.
class Slab {
 public:
  Slab(const Session& session, std::size_t bytes) {
    epd_session_info_t info;
    epd_session_info_init(&info);
    must(epd_session_info(session.get(), &info), "session info");
    memory_ = Allocation::of_epd(gpu_of(info), bytes);
    must(epd_memory_register(session.get(), begin(), bytes), "epd_memory_register");
  }
  std::byte* begin() const { return memory_->address(); }
  std::byte* take(std::size_t bytes) {
    std::byte* const at = begin() + used_;
    used_ += abi::align_up(bytes, 256);
    RANK_CHECK(used_ <= memory_->bytes(), "the slab is too small");
    return at;
  }

 private:
  std::shared_ptr<Allocation> memory_;
  std::size_t used_ = 0;
};

// "host"; or a stream on a device: "cuda", "resident", whose streams wait by memory operations or
// "_by_kernel".
class CallersMemory : public Conformance {
 protected:
  std::string device_kind() const override {
    return GetParam().starts_with("resident") ? "resident" : GetParam().starts_with("cuda") ? "cuda" : "host";
  }
  static std::uint32_t kernel_waits() { return GetParam().ends_with("by_kernel") ? ~0u : 0; }
  static bool by_calls() { return GetParam().starts_with("resident"); }
  Case memory_case(std::uint64_t seed, std::uint32_t num_ranks) const {
    Case c = random_case(base_seed() + seed, num_ranks);
    c.bound = 0;
    c.depth = 2 + seed % 2;
    c.num_handles = 2;
    c.kernel_waits = kernel_waits();
    if (!on_host()) c.sum_ranks = 0;
    add_formats(c);
    return c;
  }
  Case large_case(epd_layout_t layout) const {
    Case c = memory_case(21100, 2);
    c.num_experts = 4;
    c.topk = 2;
    c.hidden = 16384;
    c.max_tokens = 300;
    c.max_recv_rows = 0;
    c.alignment = 1;
    c.layout = layout;
    c.payload = layout == EPD_LAYOUT_COMPACT ? EPD_PAYLOAD_BF16 : EPD_PAYLOAD_FP8_CAST;
    c.scales = EPD_SCALE_FORMAT_FLOAT32;
    c.more_formats.clear();
    c.scale_layout = EPD_SCALE_LAYOUT_ROW_MAJOR;
    c.opaque_bytes = 0;
    c.routing = Routing::kUniform;
    c.sizes = Sizes::kFull;
    c.zero_padding = false;
    return c;
  }
  using RegisteredBody = std::function<void(const Session&, const Group&, std::uint32_t, Slab*)>;
  // With room for so many slots. Where nothing can be registered, that is said, and there is no slab.
  void with_registered(const Case& c, std::size_t slots, const RegisteredBody& body) {
    SCOPED_TRACE(c.describe());
    const std::string name = group_name();
    const std::size_t bytes = slots * (SlotImage(c).bytes() * 2 + 65536);
    expect_all_ok(run_ranks(c.num_ranks, 120, [&](std::uint32_t rank) -> std::string {
      const Session session = session_of(rank, c.wait_by_on(rank));
      std::unique_ptr<Slab> slab;
      if (by_calls()) {
        slab = std::make_unique<Slab>(session, bytes);
      } else {
        std::uint64_t word[4] = {};
        must(epd_memory_register(session.get(), word, sizeof(word)), "register", EPD_UNSUPPORTED);
      }
      const Group group(session, c.config(name.c_str(), rank), 0, in_streams() || c.in_stream_on(rank));
      body(session, group, rank, slab.get());
      return "";
    }));
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, CallersMemory,
                         testing::Values("host", "cuda", "cuda_by_kernel", "resident", "resident_by_kernel"),
                         [](const auto& tested) { return tested.param; });

// Memory that an operation may use: the host's, or a GPU's with a shadow that is copied in its stream.
struct Memory {
  std::byte* real = nullptr;
  std::byte* given = nullptr;  // as it was before
  std::byte* got = nullptr;    // as it is afterwards
};

std::vector<Region> regions_in(std::uint32_t set, const Case& c) {
  std::vector<Region> regions;
  for (std::uint32_t i = 0; i < abi::kNumRegions; ++i) {
    const auto region = static_cast<Region>(i);
    if ((set >> i & 1) != 0 && abi::region_bytes(c.shape(), region) != 0) regions.push_back(region);
  }
  return regions;
}

// One rank. An operation is: fill the slot and the memory, submit, wait, check.
class Rank {
 public:
  Rank(const Group& group, const Case& c, std::uint32_t rank, bool on_host, Slab* slab = nullptr)
      : group_(group), case_(c), rank_(rank), image_(c), on_host_(on_host), slab_(slab) {
    if (!on_host) stream_ = std::make_unique<GpuStream>(group.gpu());
    slot_ = take(image_.bytes(), false);
  }

  Memory take(std::size_t bytes, bool real = true) {
    Memory m;
    if (on_host_) {
      for (std::byte** const place : {&m.real, &m.given, &m.got}) {
        held_.push_back(std::make_unique<Bytes>(bytes + 128));
        void* at = held_.back()->data();
        std::size_t space = bytes + 128;
        *place = static_cast<std::byte*>(std::align(128, bytes, at, space));
      }
      return m;
    }
    m.given = pinned_memory(group_.gpu(), bytes);
    m.got = pinned_memory(group_.gpu(), bytes);
    if (real) m.real = slab_ != nullptr ? slab_->take(bytes) : allocate_on_gpu(group_.gpu(), bytes).address;
    return m;
  }
  GpuStream& stream() { return *stream_; }
  void* its_stream() const { return stream_ != nullptr ? stream_->get() : EPD_NO_STREAM; }
  // What lies in the slot in place of regions that are named. Rows that are not received must not be copied.
  void use_junk(int junk) { junk_ = junk; }
  const SlotImage& image() const { return image_; }
  const Memory& slot_memory() const { return slot_; }

  std::byte* slot_at(std::uint32_t slot) const {
    return on_host_ ? static_cast<std::byte*>(group_.buffers(slot).x) : group_.slot_on_gpu(slot);
  }
  void to(std::byte* real, const std::byte* given, std::size_t bytes) const {
    on_host_ ? static_cast<void>(std::memcpy(real, given, bytes)) : stream_->copy_in(real, given, bytes);
  }
  void from(std::byte* got, const std::byte* real, std::size_t bytes) const {
    on_host_ ? static_cast<void>(std::memcpy(got, real, bytes)) : stream_->copy_out(got, real, bytes);
  }

  // Inputs that are named lie in the memory, and the slot has junk in their place; outputs likewise.
  void spread(const CallerMemory& mine, const Memory& m, Memory& slot, std::uint32_t inputs,
              std::uint32_t outputs) const {
    std::memset(m.given, kPoison, mine.bytes());
    for (const Region region : regions_in(inputs | outputs, case_)) {
      if (!mine.has(region)) continue;
      if ((inputs & abi::region_bit(region)) != 0) mine.put(region, m.given, slot.given);
      std::memset(image_.region(slot.given, region), junk_, abi::region_bytes(case_.shape(), region));
    }
  }
  // The slot as it would be without memory.
  void gather(const CallerMemory& mine, const Memory& m, const Memory& slot, std::uint32_t outputs,
              bool marks) const {
    for (const Region region : regions_in(outputs, case_)) {
      if (!mine.has(region)) continue;
      std::memset(image_.region(slot.got, region), kPoison, abi::region_bytes(case_.shape(), region));
      mine.take(region, m.got, slot.got, marks);
    }
    const std::string text = mine.changes(m.given, m.got, outputs);
    RANK_CHECK(text.empty(), text);
  }

  void fill_dispatch(const CallerMemory& mine, const Memory& m, Round round, bool cached) {
    std::memset(slot_.given, 0x5a, image_.bytes());
    test::fill_dispatch(case_, image_.buffers(slot_.given), make_input(case_, rank_, round), cached);
    spread(mine, m, slot_, kDispatchInputs, kDispatchOutputs);
  }
  void check_dispatch(const CallerMemory& mine, const Memory& m, Round round, const epd_result_t& result) {
    gather(mine, m, slot_, kDispatchOutputs, case_.mark_unused);
    const std::string text = test::check_dispatch(case_.at(round), image_.buffers(slot_.got),
                                                  make_inputs(case_, round), rank_, result, nullptr);
    RANK_CHECK(text.empty(), text);
  }
  void fill_combine(const CallerMemory& mine, const Memory& m, Round round) {
    std::memset(slot_.given, 0x5a, image_.bytes());
    test::fill_combine(case_, image_.buffers(slot_.given), rank_, round, rows_of(round));
    spread(mine, m, slot_, kCombineInputs, kCombineOutputs);
  }
  void check_combine(const CallerMemory& mine, const Memory& m, Round round) {
    gather(mine, m, slot_, kCombineOutputs, false);
    const std::string text =
        test::check_combine(case_, image_.buffers(slot_.got), make_inputs(case_, round), rank_, round);
    RANK_CHECK(text.empty(), text);
  }

  std::uint32_t rows_of(Round round) const {
    return kernels::reference::dispatch_to(case_.at(round).params(), make_inputs(case_, round), rank_)
        .num_recv_rows;
  }

  // All of a dispatch. `handle`: 0, or of the routing that it uses.
  epd_result_t dispatch(const CallerMemory& mine, const Memory& m, Round round, std::uint32_t slot,
                        epd_handle_t& handle, bool keep = false) {
    const std::uint32_t n = make_input(case_, rank_, round).num_tokens;
    const bool cached = handle != 0;
    fill_dispatch(mine, m, round, cached);
    upload(mine, m, slot, kDispatchOutputs);
    const epd_memory_t memory = mine.memory(m.real);
    epd_dispatch_args_t args = dispatch_args(case_.at(round), cached ? 0 : n);
    args.slot = slot;
    args.handle = handle;
    args.memory = &memory;
    args.keep_handle = keep ? 1 : 0;
    epd_ticket_t ticket = 0;
    epd_result_t result;
    epd_result_init(&result);
    result.status = epd_dispatch(group_.get(), &args, its_stream(), &ticket, &handle);
    if (result.status == EPD_OK) result = finish(ticket);
    download(mine, m, slot);
    return result;
  }
  void combine(const CallerMemory& mine, const Memory& m, Round round, std::uint32_t slot,
               epd_handle_t handle, const epd_memory_t* counts) {
    fill_combine(mine, m, round);
    upload(mine, m, slot, kCombineOutputs);
    const epd_memory_t memory = with_counts(mine.memory(m.real), counts);
    epd_combine_args_t args = combine_args(case_, round);
    args.slot = slot;
    args.handle = handle;
    args.memory = &memory;
    epd_ticket_t ticket = 0;
    must(epd_combine(group_.get(), &args, its_stream(), &ticket), "combine");
    const epd_result_t result = finish(ticket);
    must(result.status, "combine");
    download(mine, m, slot);
  }
  static epd_memory_t with_counts(epd_memory_t memory, const epd_memory_t* counts) {
    if (counts == nullptr) return memory;
    memory.rank_offsets = counts->rank_offsets;
    memory.expert_counts = counts->expert_counts;
    memory.expert_offsets = counts->expert_offsets;
    return memory;
  }

 private:
  // The slot's count regions stay: they tell of the dispatch that is combined.
  void upload(const CallerMemory& mine, const Memory& m, std::uint32_t slot, std::uint32_t outputs) {
    to(m.real, m.given, mine.bytes());
    for (const Region region : regions_in(kAllRegions, case_)) {
      const bool counts = (kCountOutputs & abi::region_bit(region)) != 0;
      if (counts && (outputs & abi::region_bit(region)) == 0) continue;
      const auto offset = image_.region(slot_.given, region) - slot_.given;
      to(slot_at(slot) + offset, slot_.given + offset, abi::region_bytes(case_.shape(), region));
    }
  }
  void download(const CallerMemory& mine, const Memory& m, std::uint32_t slot) const {
    from(m.got, m.real, mine.bytes());
    from(slot_.got, slot_at(slot), image_.bytes());
    if (stream_ != nullptr) RANK_CHECK(stream_->finish(60), "the stream waits");
  }

  // Takes the end in one of the ways in which that is done.
  epd_result_t finish(epd_ticket_t ticket) {
    epd_result_t result;
    epd_result_init(&result);
    if (stream_ != nullptr) {
      if (case_.defer)
        must(epd_ticket_wait_on_stream(group_.get(), ticket, stream_->get()), "wait on stream");
      RANK_CHECK(stream_->finish(60), "the stream waits");
    }
    switch (ends_++ % 3) {
      case 0: epd_ticket_wait(group_.get(), ticket, kWaitMs, &result); break;
      case 1:
        while (epd_ticket_poll(group_.get(), ticket, &result) == EPD_WOULD_BLOCK) sleep_ms(1);
        break;
      default: {
        struct Seen {
          std::atomic<bool> done{false};
          epd_result_t result{};
        } seen;
        const auto hook = [](const epd_result_t* its, void* user) {
          auto& to = *static_cast<Seen*>(user);
          to.result = *its;
          to.done = true;
        };
        must(epd_ticket_on_complete(group_.get(), ticket, hook, &seen), "hook");
        RANK_CHECK(eventually(60, [&] { return seen.done.load(); }), "the hook never came");
        result = seen.result;
      }
    }
    return result;
  }

  const Group& group_;
  const Case case_;
  const std::uint32_t rank_;
  const SlotImage image_;
  const bool on_host_;
  Slab* const slab_;
  std::unique_ptr<GpuStream> stream_;
  std::vector<std::unique_ptr<Bytes>> held_;
  Memory slot_;
  std::uint32_t ends_ = 0;
  int junk_ = 0x5a;
};

// ---- any case

// Regions that are named, rows of tokens, and room for received rows, all as the seed says.
CallerMemory random_memory(const Case& c, std::uint32_t rank, Round round, std::uint32_t rows,
                           std::mt19937_64& random, bool aligned = false) {
  const std::uint32_t tokens = make_input(c, rank, round).num_tokens;
  const std::uint32_t named = random() % 3 == 0 ? kAllRegions : static_cast<std::uint32_t>(random());
  std::uint32_t room = 0;
  if (c.layout == EPD_LAYOUT_EXPERT) {
    if (random() % 2 == 0) room = static_cast<std::uint32_t>(c.shape().expert_capacity() + random() % 9);
  } else if (random() % 2 == 0) {
    room = std::max(1u, rows + static_cast<std::uint32_t>(random() % 3));
    room = std::min(room, static_cast<std::uint32_t>(c.shape().recv_rows()));
  }
  return {c.at(round), named, tokens, room, random(), aligned};
}

void run_rounds(const Group& group, const Case& c, std::uint32_t rank, bool on_host, std::uint64_t rounds = 3,
                Slab* slab = nullptr) {
  Rank self(group, c, rank, on_host, slab);
  const auto aligned = [&](std::uint64_t number) { return slab != nullptr && number % 3 != 2; };
  std::mt19937_64 random(c.seed * 100 + rank);
  for (std::uint64_t number = 0; number < rounds; ++number) {
    const Round first(number);
    const std::uint32_t rows = self.rows_of(first);
    // All ranks use the same slots.
    const auto slot = static_cast<std::uint32_t>(number % c.depth);
    const std::uint32_t other = (slot + 1) % c.depth;
    note(c.describe() + ", round " + std::to_string(number));
    const CallerMemory dispatched = random_memory(c, rank, first, rows, random, aligned(number));
    const Memory m = self.take(dispatched.bytes());
    epd_handle_t handle = 0;
    epd_result_t result = self.dispatch(dispatched, m, first, slot, handle, number == 1);
    must(result.status, "dispatch");
    self.check_dispatch(dispatched, m, first, result);
    const epd_memory_t counts = dispatched.memory(m.real);
    const epd_memory_t* const own_counts = random() % 2 == 0 ? &counts : nullptr;

    note("combine");
    const CallerMemory combined = random_memory(c, rank, first, rows, random, aligned(number));
    const Memory back = self.take(combined.bytes());
    self.combine(combined, back, first, number % 2 == 0 ? slot : other, handle, own_counts);
    self.check_combine(combined, back, first);

    note("dispatch under the handle");
    const Round again(number + 40, number);
    const CallerMemory under = random_memory(c, rank, again, rows, random, aligned(number));
    const Memory third = self.take(under.bytes());
    epd_handle_t same = handle;
    result = self.dispatch(under, third, again, other, same);
    must(result.status, "dispatch under a handle");
    self.check_dispatch(under, third, again, result);
    self.combine(combined, back, again, other, handle, nullptr);
    self.check_combine(combined, back, again);
    if (number == 1) must(epd_handle_release(group.get(), handle), "release");
  }
}

TEST_P(CallersMemory, AnyCaseIsBitExact) {
  for (std::uint64_t i = 0; i < 24; ++i) {
    const Case c = memory_case(21000 + i, 1 + i % 3);
    with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
      run_rounds(group, c, rank, on_host());
    });
    if (HasFailure()) return;
  }
}

// Of which streams copy in larger parts, by more blocks, and wait by one thread.
TEST_P(CallersMemory, LargeOperationsToo) {
  for (const epd_layout_t layout : {EPD_LAYOUT_COMPACT, EPD_LAYOUT_EXPERT}) {
    const Case c = large_case(layout);
    with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
      run_rounds(group, c, rank, on_host(), 1);
    });
    if (HasFailure()) return;
  }
}

// ---- registered memory

TEST_P(CallersMemory, AnyCaseInRegisteredMemoryIsBitExact) {
  for (std::uint64_t i = 0; i < 24; ++i) {
    const Case c = memory_case(21200 + i, 1 + i % 3);
    with_registered(c, 24, [&](const Session&, const Group& group, std::uint32_t rank, Slab* slab) {
      run_rounds(group, c, rank, on_host(), 3, slab);
    });
    if (HasFailure()) return;
  }
}

TEST_P(CallersMemory, LargeOperationsInRegisteredMemory) {
  for (const epd_layout_t layout : {EPD_LAYOUT_COMPACT, EPD_LAYOUT_EXPERT}) {
    const Case c = large_case(layout);
    with_registered(c, 10, [&](const Session&, const Group& group, std::uint32_t rank, Slab* slab) {
      run_rounds(group, c, rank, on_host(), 1, slab);
    });
    if (HasFailure()) return;
  }
}

// What lies in the slot in place of the rows stays there. Once the memory is not registered, they are copied.
TEST_P(CallersMemory, RowsInRegisteredMemoryAreNotCopied) {
  if (!by_calls()) GTEST_SKIP() << "only calls have places";
  for (std::uint64_t i = 0; i < 6; ++i) {
    Case c = memory_case(21300 + i, 2);
    c.max_recv_rows = 0;
    with_registered(c, 16, [&](const Session& session, const Group& group, std::uint32_t rank, Slab* slab) {
      Rank self(group, c, rank, on_host(), slab);
      const auto junk_in = [&](Region region) {
        const auto* const at = self.image().region(self.slot_memory().got, region);
        return std::all_of(at, at + abi::region_bytes(c.shape(), region),
                           [](std::byte b) { return b == std::byte{0x5a}; });
      };
      for (const bool registered : {true, false}) {
        const Round round(registered ? 1 : 2);
        const auto why = [&](const char* name) {
          return std::string(name) + (registered ? " is copied" : " is not copied") + ": " + c.describe();
        };
        const std::uint32_t tokens = make_input(c, rank, round).num_tokens;
        if (!registered) must(epd_memory_unregister(session.get(), slab->begin()), "unregister");
        const CallerMemory mine(c.at(round), kAllRegions, tokens, 0, 7, true);
        const Memory there = self.take(mine.bytes());
        const Memory back = self.take(mine.bytes());
        epd_handle_t handle = 0;
        epd_result_t result = self.dispatch(mine, there, round, 0, handle);
        must(result.status, "dispatch");
        RANK_CHECK(junk_in(Region::kX) == (registered || tokens == 0), why("x"));
        RANK_CHECK(!registered || junk_in(Region::kRecvX), why("recv_x"));
        self.check_dispatch(mine, there, round, result);
        self.combine(mine, back, round, 0, handle, nullptr);
        RANK_CHECK(!registered || junk_in(Region::kY), why("y"));
        RANK_CHECK(junk_in(Region::kOut) == (registered || tokens == 0), why("out"));
        self.check_combine(mine, back, round);
      }
      must(epd_memory_unregister(session.get(), slab->begin()), "unregister again", EPD_NOT_FOUND);
    });
    if (HasFailure()) return;
  }
}

// ---- graphs

// Dispatch and combine as one graph, whose number of tokens is read at each replay; y comes from another
// allocation than the rows.
void replay_rounds(const Group& group, const Case& of_group, std::uint32_t rank) {
  const Case c = of_group.at(Round(0));  // the row format of all its rounds
  Rank self(group, c, rank, false);
  const CallerMemory dispatched(c, kAllRegions, c.max_tokens, 0, c.seed);
  const CallerMemory combined(c, kAllRegions, c.max_tokens, 0, c.seed + 1);
  const Memory m = self.take(dispatched.bytes());
  const Memory back = self.take(combined.bytes());
  const Memory n = self.take(4);
  const epd_memory_t to_dispatch = dispatched.memory(m.real);
  const epd_memory_t to_combine = Rank::with_counts(combined.memory(back.real), &to_dispatch);
  GpuStream& stream = self.stream();
  const Round shape(0);  // of which the number of biases is that of all rounds

  stream.begin_capture();
  stream.copy_in(n.real, n.given, 4);
  stream.copy_in(m.real, m.given, dispatched.bytes());
  stream.copy_in(back.real, back.given, combined.bytes());
  epd_dispatch_args_t args = dispatch_args(c, 0);
  args.num_tokens_at = reinterpret_cast<const std::uint32_t*>(n.real);
  args.memory = &to_dispatch;
  epd_ticket_t tickets[2] = {};
  epd_handle_t handle = 0;
  must(epd_dispatch(group.get(), &args, stream.get(), &tickets[0], &handle), "captured dispatch");
  if (c.defer) must(epd_ticket_wait_on_stream(group.get(), tickets[0], stream.get()), "captured wait");
  epd_combine_args_t then = combine_args(c, shape);
  then.slot = 1;
  then.handle = handle;
  then.memory = &to_combine;
  then.num_tokens_at = args.num_tokens_at;
  must(epd_combine(group.get(), &then, stream.get(), &tickets[1]), "captured combine");
  if (c.defer) must(epd_ticket_wait_on_stream(group.get(), tickets[1], stream.get()), "captured wait");
  stream.copy_out(m.got, m.real, dispatched.bytes());
  stream.copy_out(back.got, back.real, combined.bytes());
  const GpuGraph graph = stream.end_capture();

  std::vector<std::byte> image(self.image().bytes());
  Memory slot{nullptr, image.data(), self.slot_memory().got};
  for (std::uint64_t number = 0; number < 6; ++number) {
    const Round round(number * 6, number);
    note("replay " + std::to_string(number));
    const Input input = make_input(c, rank, round);
    std::memcpy(n.given, &input.num_tokens, 4);
    test::fill_dispatch(c, self.image().buffers(image.data()), input);
    self.spread(dispatched, m, slot, kDispatchInputs, kDispatchOutputs);
    test::fill_combine(c, self.image().buffers(image.data()), rank, round, self.rows_of(round));
    self.spread(combined, back, slot, kCombineInputs, kCombineOutputs);
    stream.launch(graph);
    RANK_CHECK(stream.finish(60), "the stream waits");
    epd_result_t result;
    epd_result_init(&result);
    must(epd_ticket_wait(group.get(), tickets[0], kWaitMs, &result), "dispatch");
    self.check_dispatch(dispatched, m, round, result);
    must(epd_ticket_wait(group.get(), tickets[1], kWaitMs, &result), "combine");
    self.check_combine(combined, back, round);
  }
}

TEST_P(CallersMemory, AGraphIsReplayedWithWhatTheMemoryHoldsThen) {
  if (!by_calls()) GTEST_SKIP() << "graphs are for calls";
  for (std::uint64_t i = 0; i < 9; ++i) {
    Case c = memory_case(22000 + i, 2);
    c.layout = static_cast<epd_layout_t>(i % 3);
    c.max_recv_rows = 0;
    with_ranks(
        c, [&](const Session&, const Group& group, std::uint32_t rank) { replay_rounds(group, c, rank); });
    if (HasFailure()) return;
  }
}

// `out` has room for n rows. The dispatch that the combine is replayed for had more.
TEST_P(CallersMemory, AReplayedCombineWritesNoMoreRowsThanWhenItWasCaptured) {
  if (!by_calls()) GTEST_SKIP() << "graphs are for calls";
  constexpr std::uint32_t kFew = 2;
  for (const bool registered : {false, true}) {
    SCOPED_TRACE(registered ? "registered" : "not registered");
    Case c;
    c.seed = base_seed() + 22100;
    c.num_ranks = 1;
    c.num_experts = 2;
    c.kernel_waits = kernel_waits();
    with_registered(c, 4, [&](const Session&, const Group& group, std::uint32_t, Slab* slab) {
      const std::size_t row = std::size_t{c.hidden} * 2;
      const std::size_t bytes = c.max_tokens * row;
      const GpuStream stream(group.gpu());
      std::byte* const out = registered ? slab->take(bytes) : allocate_on_gpu(group.gpu(), bytes).address;
      std::byte* const seen = pinned_memory(group.gpu(), bytes);
      const auto dispatch = [&](std::uint32_t tokens) {
        const epd_dispatch_args_t args = dispatch_args(c, tokens);
        epd_ticket_t ticket = 0;
        epd_handle_t handle = 0;
        must(epd_dispatch(group.get(), &args, stream.get(), &ticket, &handle), "dispatch");
        RANK_CHECK(stream.finish(60), "the stream waits");
        must(epd_ticket_wait(group.get(), ticket, kWaitMs, nullptr), "dispatch");
        return handle;
      };
      epd_memory_t memory;
      epd_memory_init(&memory);
      memory.out = out;
      epd_combine_args_t args = combine_args(c, Round(0));
      args.handle = dispatch(kFew);
      args.memory = &memory;
      epd_ticket_t ticket = 0;
      stream.begin_capture();
      must(epd_combine(group.get(), &args, stream.get(), &ticket), "captured combine");
      const GpuGraph graph = stream.end_capture();
      dispatch(c.max_tokens);
      std::memset(seen, kPoison, bytes);
      stream.copy_in(out, seen, bytes);
      stream.launch(graph);
      stream.copy_out(seen, out, bytes);
      RANK_CHECK(stream.finish(60), "the stream waits");
      const auto poisoned = [](std::byte b) { return b == std::byte{kPoison}; };
      RANK_CHECK(std::none_of(seen, seen + kFew * row, poisoned), "no rows");
      RANK_CHECK(std::all_of(seen + kFew * row, seen + bytes, poisoned), "more rows than there is room for");
    });
    if (HasFailure()) return;
  }
}

// ---- what goes wrong

TEST_P(CallersMemory, MoreRowsThanThereIsRoomForFailOnThisRankOnly) {
  for (const epd_layout_t layout : {EPD_LAYOUT_COMPACT, EPD_LAYOUT_PACKED}) {
    for (const bool marked : {false, true}) {
      Case c;
      c.seed = base_seed() + 23000;
      c.num_ranks = 2;
      c.num_experts = 4;
      c.max_tokens = 8;
      c.layout = layout;
      c.sizes = Sizes::kFull;
      c.mark_unused = marked;
      c.kernel_waits = kernel_waits();
      with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
        Rank self(group, c, rank, on_host());
        self.use_junk(kPoison);
        const Round round(3);
        const std::uint32_t rows = self.rows_of(round);
        RANK_CHECK(rows > 1, "too few rows for this test");
        const CallerMemory mine(c, kDispatchOutputs, 8, rank == 0 ? rows - 1 : rows, 5);
        const Memory m = self.take(mine.bytes());
        epd_handle_t handle = 0;
        epd_result_t result = self.dispatch(mine, m, round, 0, handle);
        RANK_CHECK(result.num_recv_rows == rows, "M is " + std::to_string(result.num_recv_rows));
        if (rank == 0) {
          must(result.status, "dispatch", EPD_RESOURCE_EXHAUSTED);
          // The rows are where they would be without memory; here are only counts.
          self.gather(mine, m, self.slot_memory(), kCountOutputs, false);
          const std::string text = check_dispatch(c, self.image().buffers(self.slot_memory().got),
                                                  make_inputs(c, round), rank, result, nullptr);
          RANK_CHECK(text.empty(), text);
        } else {
          must(result.status, "dispatch");
          self.check_dispatch(mine, m, round, result);
        }
        const CallerMemory none(c, 0, 8, 0, 6);
        const Memory nothing = self.take(none.bytes());
        self.combine(none, nothing, round, 0, handle, nullptr);
        self.check_combine(none, nothing, round);
      });
      if (HasFailure()) return;
    }
  }
}

TEST_P(CallersMemory, ALostRankLeavesAllElseAlone) {
  Case c;
  c.seed = base_seed() + 24000;
  c.num_ranks = 2;
  c.sizes = Sizes::kFull;
  c.kernel_waits = kernel_waits();
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    if (rank == 1) {  // it leaves, most probably amid the operation
      sleep_ms(200);
      return;
    }
    Rank self(group, c, rank, on_host());
    const CallerMemory mine(c, kAllRegions, 8, 0, 5);
    const Memory m = self.take(mine.bytes());
    epd_handle_t handle = 0;
    const epd_result_t result = self.dispatch(mine, m, Round(0), 0, handle);
    must(result.status, "dispatch", EPD_RANK_LOST);
    const std::string text = mine.changes(m.given, m.got, on_host() ? 0 : kDispatchOutputs);
    RANK_CHECK(text.empty(), text);
  });
}

// ---- the host's copies

class HostCopies : public CallersMemory {
 protected:
  void SetUp() override {
    if (GetParam() != "host") GTEST_SKIP() << "of host devices";
    CallersMemory::SetUp();
  }
  Case one_rank() const {
    Case c;
    c.seed = base_seed() + 25000;
    c.num_ranks = 1;
    c.num_experts = 2;
    c.sizes = Sizes::kFull;
    return c;
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, HostCopies, testing::Values("host"),
                         [](const auto& tested) { return tested.param; });

// Memory that is gone faults when it is touched.
class Pages {
 public:
  explicit Pages(std::size_t bytes)
      : bytes_(bytes),
        at_(static_cast<std::byte*>(
            ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~Pages() { ::munmap(at_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::byte* at() const { return at_; }

 private:
  const std::size_t bytes_;
  std::byte* const at_;
};

epd_ticket_t submit(const Group& group, const Case& c, const CallerMemory& mine, std::byte* at, Round round,
                    std::uint32_t slot) {
  const SlotImage image(c);
  std::vector<std::byte> slot_image(image.bytes());
  const Input input = make_input(c, 0, round);
  fill_dispatch(c, image.buffers(slot_image.data()), input);
  std::memset(at, kPoison, mine.bytes());
  for (const Region region : regions_in(kDispatchInputs, c)) mine.put(region, at, slot_image.data());
  const epd_memory_t memory = mine.memory(at);
  epd_dispatch_args_t args = dispatch_args(c, input.num_tokens);
  args.slot = slot;
  args.memory = &memory;
  epd_ticket_t ticket = 0;
  must(epd_dispatch(group.get(), &args, EPD_NO_STREAM, &ticket, nullptr), "dispatch");
  return ticket;
}

std::string received(const Case& c, const CallerMemory& mine, const std::byte* at, Round round,
                     const epd_result_t& result) {
  const SlotImage image(c);
  std::vector<std::byte> slot(image.bytes(), std::byte{kPoison});
  for (const Region region : regions_in(kDispatchOutputs, c)) mine.take(region, at, slot.data(), false);
  return check_dispatch(c, image.buffers(slot.data()), make_inputs(c, round), 0, result, nullptr);
}

TEST_P(HostCopies, InputsMayGoAtOnceAndOutputsWhenTheEndIsTaken) {
  const Case c = one_rank();
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t) {
    const CallerMemory inputs(c, kDispatchInputs, 8, 0, 5);
    const CallerMemory all(c, kAllRegions, 8, 0, 6);
    for (std::uint32_t i = 0; i < 20; ++i) {
      epd_ticket_t ticket = 0;
      {
        const Pages pages(inputs.bytes());
        ticket = submit(group, c, inputs, pages.at(), Round(i), 0);
      }
      must(epd_ticket_wait(group.get(), ticket, kWaitMs, nullptr), "dispatch from memory that is gone");
      {
        const Pages pages(all.bytes());
        ticket = submit(group, c, all, pages.at(), Round(i), 0);
        if (i % 2 == 0) {
          epd_result_t result;
          epd_result_init(&result);
          must(epd_ticket_wait(group.get(), ticket, kWaitMs, &result), "dispatch");
          const std::string text = received(c, all, pages.at(), Round(i), result);
          RANK_CHECK(text.empty(), text);
        } else {
          must(epd_ticket_drop(group.get(), ticket), "drop");
        }
      }
      // Whatever comes after it on the slot.
      const double until = now_s() + 30;
      while (epd_noop(group.get(), 0, EPD_NO_STREAM, &ticket) == EPD_WOULD_BLOCK && now_s() < until)
        sleep_ms(1);
      must(epd_ticket_wait(group.get(), ticket, kWaitMs, nullptr), "noop");
    }
  });
}

TEST_P(HostCopies, OutputsAreSavedBeforeTheSlotIsUsedAgain) {
  const Case c = one_rank();
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t) {
    const CallerMemory mine(c, kAllRegions, 8, 0, 5);
    constexpr std::uint32_t kOps = 5;
    const Pages pages(mine.bytes() * kOps);
    epd_ticket_t tickets[kOps] = {};
    for (std::uint32_t i = 0; i < kOps; ++i) {
      tickets[i] = submit(group, c, mine, pages.at() + i * mine.bytes(), Round(i), 0);
      RANK_CHECK(eventually(30, [&] { return epd_ticket_pending(group.get(), tickets[i]) == 0; }), "no end");
    }
    for (std::uint32_t i = 0; i < kOps; ++i) {
      epd_result_t result;
      epd_result_init(&result);
      must(epd_ticket_wait(group.get(), tickets[i], kWaitMs, &result), "dispatch");
      const std::string text = received(c, mine, pages.at() + i * mine.bytes(), Round(i), result);
      RANK_CHECK(text.empty(), text);
    }
  });
}

TEST_P(HostCopies, AForkedChildCopiesNothing) {
  const Case c = one_rank();
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t) {
    const CallerMemory mine(c, kAllRegions, 8, 0, 5);
    const Pages pages(mine.bytes());
    const epd_ticket_t ticket = submit(group, c, mine, pages.at(), Round(0), 0);
    const std::vector<std::byte> before(pages.at(), pages.at() + mine.bytes());
    RankProcess child([&]() -> std::string {
      must(epd_ticket_wait(group.get(), ticket, kWaitMs, nullptr), "wait in a child", EPD_INVALID_ARGUMENT);
      return std::equal(before.begin(), before.end(), pages.at()) ? "" : "the child copied";
    });
    const RankOutcome outcome = child.wait(30);
    RANK_CHECK(outcome.ok, outcome.to_string());
    must(epd_ticket_wait(group.get(), ticket, kWaitMs, nullptr), "dispatch");
  });
}

}  // namespace
}  // namespace epd::test
