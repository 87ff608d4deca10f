// Messages about groups that span nodes: whatever bytes come are refused with a reason, or are a message
// that, said again, is the same. Input: a byte for the direction, then the bytes of the message.

#include "fuzz.h"
#include "membership_wire.h"

namespace epd::test {
namespace {

template <typename Wire>
void hear(const std::string& bytes) {
  Wire message;
  if (!message.ParseFromString(bytes)) return;
  const auto heard = cluster::parse(message);
  if (!heard.ok()) {
    require(heard.status().message().find("; allowed: ") != std::string::npos, heard.status().message());
    return;
  }
  const Wire said = cluster::message_of(heard.value());
  const auto again = cluster::parse(said);
  require(again.ok(), again.status().message());
  require(cluster::message_of(again.value()).SerializeAsString() == said.SerializeAsString(),
          "it is another one");
}

}  // namespace
}  // namespace epd::test

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  epd::test::Bytes input(data, size);
  if (input.byte() % 2 == 0) {
    epd::test::hear<epd::v1::membership::ToCoordinator>(input.text(input.left()));
  } else {
    epd::test::hear<epd::v1::membership::ToAgent>(input.text(input.left()));
  }
  return 0;
}
