// Ranks that name memory of the caller's own (epd_memory_t), for the tests of it.
#pragma once

#include "conformance.h"
#include "support/caller_memory.h"
#include "support/cuda_memory.h"

#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace epd::test::callers_memory {

using abi::Region;
using Bytes = std::vector<std::byte>;

// Memory of a GPU that is handed out once. Registered it is of cuMemCreate or of cudaMalloc.
class Slab {
 public:
  enum Kind { kOfCreate, kOfMalloc, kNotRegistered, kOfPieces };  // the last two are not registered

  Slab(const Session& session, std::size_t bytes, Kind kind = kOfCreate) : bytes_(bytes), kind_(kind) {
    epd_session_info_t info;
    epd_session_info_init(&info);
    must(epd_session_info(session.get(), &info), "session info");
    gpu_ = gpu_of(info);
    if (kind == kOfPieces) pieces_ = std::make_unique<PiecedMemory>(gpu_, bytes);
    begin_ = kind == kOfCreate   ? allocate_on_gpu(gpu_, bytes).address
             : kind == kOfPieces ? pieces_->begin()
                                 : malloc_on_gpu(gpu_, bytes);
    if (kind == kOfCreate || kind == kOfMalloc)
      must(epd_memory_register(session.get(), begin_, bytes), "epd_memory_register");
  }
  ~Slab() {
    if (kind_ == kOfMalloc || kind_ == kNotRegistered) free_on_gpu(gpu_, begin_);
  }
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;
  std::byte* begin() const { return begin_; }
  // Frees its pieces, and puts others in their places.
  void renew() const { pieces_->renew(); }
  std::byte* take(std::size_t bytes) {
    std::byte* const at = begin() + used_;
    used_ += abi::align_up(bytes, 256);
    RANK_CHECK(used_ <= bytes_, "the slab is too small");
    return at;
  }

 private:
  const std::size_t bytes_;
  const Kind kind_;
  int gpu_ = 0;
  std::unique_ptr<PiecedMemory> pieces_;
  std::byte* begin_ = nullptr;
  std::size_t used_ = 0;
};

// "host"; or a stream on a GPU: "cuda", whose streams wait by memory operations, or "cuda_by_kernel".
class CallersMemory : public Conformance {
 protected:
  std::string device_kind() const override { return GetParam().starts_with("cuda") ? "cuda" : "host"; }
  static std::uint32_t kernel_waits() { return GetParam().ends_with("by_kernel") ? ~0u : 0; }
  static bool by_calls() { return GetParam().starts_with("cuda"); }
  Case memory_case(std::uint64_t seed, std::uint32_t num_ranks) const {
    Case c = random_case(base_seed() + seed, num_ranks);
    c.depth = 2 + seed % 2;
    c.num_handles = 2;
    c.kernel_waits = kernel_waits();
    if (!on_host()) c.sum_ranks = 0;
    add_formats(c);
    return c;
  }
  // Just above 8 MiB of rows, from where on an operation is large.
  Case large_case(epd_layout_t layout) const {
    Case c = memory_case(21100, 2);
    c.num_experts = 4;
    c.topk = 1;
    c.hidden = 16384;
    c.max_tokens = 257;
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
  static Slab::Kind kind_of(std::uint64_t number) {
    return number % 2 == 0 ? Slab::kOfCreate : Slab::kOfMalloc;
  }
  using RegisteredBody = std::function<void(const Session&, const Group&, std::uint32_t, Slab*)>;
  // Runs the body with space for so many slots. Where nothing can be registered, the test says so, and there
  // is no slab.
  void with_registered(const Case& c, std::size_t slots, const RegisteredBody& body,
                       Slab::Kind kind = Slab::kOfCreate) {
    SCOPED_TRACE(c.describe());
    const std::string name = group_name();
    const std::size_t bytes = slots * (SlotImage(c).bytes() * 2 + 65536);
    expect_all_ok(run_ranks(c.num_ranks, 120, [&](std::uint32_t rank) -> std::string {
      const Session session = session_of(rank, c.wait_by_on(rank));
      std::unique_ptr<Slab> slab;
      if (by_calls()) {
        slab = std::make_unique<Slab>(session, bytes, kind);
      } else {
        std::uint64_t word[4] = {};
        must(epd_memory_register(session.get(), word, sizeof(word)), "register", EPD_UNSUPPORTED);
      }
      const Group group(session, c.config(name.c_str(), rank), in_streams() || c.in_stream_on(rank));
      body(session, group, rank, slab.get());
      return "";
    }));
  }
};

// Memory that an operation may use: the host's, or a GPU's with a shadow that is copied in its stream.
struct Memory {
  std::byte* real = nullptr;
  std::byte* given = nullptr;  // as it was before
  std::byte* got = nullptr;    // as it is afterwards
};

// The regions of the set that the group has.
std::vector<Region> regions_in(std::uint32_t set, const Case& c);

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
  // The slot has this in place of regions that are named. Rows that are not received must not be copied.
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

  // Named inputs lie in the memory, and the slot has junk in their place; outputs also.
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

}  // namespace epd::test::callers_memory
