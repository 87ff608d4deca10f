// The far protocol: whatever bytes another node sends, a header that is read is one that its type may have,
// and bodies are read within their bytes. Input: the header's 96 bytes, then the body.

#include "fuzz.h"
#include "proto/far.h"

#include <memory>

namespace epd::test {
namespace {

using abi::FarHeader;
using abi::FarReason;
using abi::FarType;

bool between_engines(FarType type) {
  return type == FarType::kGreeting || type == FarType::kPing || type == FarType::kPong ||
         type == FarType::kRefuse;
}

void check_header(const FarHeader& h, std::size_t body_bytes) {
  require(h.magic == abi::kFarMagic && h.version == abi::kFarVersion, "format");
  require(h.type >= FarType::kGreeting && h.type <= FarType::kRefuse, "a type");
  require(h.body_bytes == body_bytes && body_bytes <= abi::kMaxFarBodyBytes, "the body is what it says");
  const bool ping = h.type == FarType::kPing || h.type == FarType::kPong;
  require((h.number == 0) == ping && (ping || h.time_ns != 0), "a group's messages are numbered");
  require((h.group == 0) == ping && (abi::epoch_of_tag(h.tag) == 0) == ping, "a group has an epoch");
  require(between_engines(h.type) == (h.from_rank >= abi::kMaxRanks), "ranks where there are some");
  require(between_engines(h.type) == (h.to_rank >= abi::kMaxRanks), "on both sides");
  require(!between_engines(h.type) || (h.row_credits | h.sum_credits) == 0, "credits are of ranks");
  require(h.batch < abi::kMaxFarBatches && h.batches <= abi::kMaxFarBatches, "batches in their limits");
  require(h.batches == 0 || h.batches > h.batch, "a batch is one of them");
  const bool batch = h.type == FarType::kRows || h.type == FarType::kAsk || h.type == FarType::kSums;
  require(!batch || (h.records != 0 && h.body_bytes / h.records * h.records == h.body_bytes),
          "equal records");
  require(batch || h.type == FarType::kAnnounce || h.records == 0, "records where there are some");
}

template <std::size_t N>
void check_text(const char (&text)[N]) {
  require(std::memchr(text, 0, N) != nullptr, "texts end");
}

void check_body(const FarHeader& h, std::span<const std::byte> body) {
  if (h.type == FarType::kGreeting) {
    abi::FarGreeting greeting{};
    if (abi::read_far_greeting(body, greeting) != FarReason::kNone) return;
    check_text(greeting.node);
    check_text(greeting.version);
  } else if (h.type == FarType::kRefuse) {
    abi::FarRefusal refusal{};
    if (abi::read_far_refusal(body, refusal) != FarReason::kNone) return;
    check_text(refusal.text);
    require(refusal.status != StatusCode::kOk && std::strcmp(status_name(refusal.status), "UNKNOWN") != 0,
            "a status with a name");
  } else if (h.type == FarType::kAnnounce) {
    abi::FarAnnouncement announcement{};
    require(abi::read_far_announcement(body, announcement) == FarReason::kNone || announcement.reserved != 0,
            "an announcement is there");
    require(body.size() - sizeof(announcement) == std::size_t{h.records} * sizeof(std::uint32_t),
            "counts follow it");
  } else if (h.records != 0) {
    require(abi::check_far_records(h, h.body_bytes / h.records) == FarReason::kNone, "its own stride");
    require(abi::check_far_records(h, h.body_bytes / h.records + 1) == FarReason::kRecords, "no other");
  }
}

void run(const std::uint8_t* data, std::size_t size) {
  // The allocations have exactly the input's size, so that ASan sees a read past them.
  const std::size_t header_bytes = std::min(size, sizeof(FarHeader));
  const auto header = std::make_unique<std::byte[]>(header_bytes);
  const auto body = std::make_unique<std::byte[]>(size - header_bytes);
  if (header_bytes != 0) std::memcpy(header.get(), data, header_bytes);
  if (size > header_bytes) std::memcpy(body.get(), data + header_bytes, size - header_bytes);
  const std::span<const std::byte> body_span(body.get(), size - header_bytes);

  FarHeader h{};
  const FarReason reason = abi::read_far_header({header.get(), header_bytes}, body_span.size(), h);
  require(std::strcmp(abi::far_reason_name(reason), "unknown") != 0, "a reason has a name");
  if (reason != FarReason::kNone) {
    // Each by itself reads no further than its bytes.
    abi::FarGreeting greeting{};
    abi::FarAnnouncement announcement{};
    abi::FarRefusal refusal{};
    (void)abi::read_far_greeting(body_span, greeting);
    (void)abi::read_far_announcement(body_span, announcement);
    (void)abi::read_far_refusal(body_span, refusal);
    return;
  }
  check_header(h, body_span.size());
  check_body(h, body_span);
}

}  // namespace
}  // namespace epd::test

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  epd::test::run(data, size);
  return 0;
}
