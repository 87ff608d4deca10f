// Messages about groups that span nodes: whatever bytes come are refused with a reason, or are a message
// that, said again, is the same. Input: a byte for the direction, then the bytes of the message.

#include "frames.h"
#include "fuzz.h"

namespace epd::test {
namespace {

constexpr std::size_t kMost = std::size_t{1} << 30;

std::string said(const membership::ToCoordinator& message) {
  return cluster::encode(message, kMost);
}
std::string said(const membership::ToAgent& message) {
  return cluster::encode(message);
}

template <typename Message>
void hear(const std::string& bytes, Result<Message> (*decode)(std::string_view)) {
  const Result<Message> heard = decode(bytes);
  if (!heard.ok()) {
    require(heard.status().message().find("; allowed: ") != std::string::npos, heard.status().message());
    return;
  }
  const Result<Message> again = decode(said(heard.value()));
  require(again.ok(), again.status().message());
  require(said(again.value()) == said(heard.value()), "it is another one");
}

}  // namespace
}  // namespace epd::test

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  epd::test::Bytes input(data, size);
  if (input.byte() % 2 == 0) {
    epd::test::hear(input.text(input.left()), epd::cluster::decode_to_coordinator);
  } else {
    epd::test::hear(input.text(input.left()), epd::cluster::decode_to_agent);
  }
  return 0;
}
