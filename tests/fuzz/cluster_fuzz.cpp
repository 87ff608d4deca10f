// The coordinator: whatever frames come, from however many streams, in whatever order, its table stays whole,
// and a stream that was ended is not written to. Input: steps, each a byte for what and which, then what it
// needs.

#include "base/clock.h"
#include "base/log.h"
#include "cluster/address.h"
#include "coordinator_side.h"
#include "frames.h"
#include "fuzz.h"

#include <deque>
#include <functional>
#include <memory>
#include <vector>

namespace epd::test {
namespace {

using namespace cluster;

class FuzzStream final : public Stream {
 public:
  const PeerFacts& peer() const override { return peer_; }
  void read() override {
    require(!finished && !reading, "one frame is read at a time");
    reading = true;
  }
  void write(const v1::Frame& /*frame*/) override {
    require(!finished && !writing, "one frame is written at a time");
    writing = true;
  }
  void finish(const Status& /*status*/) override { finished = true; }

  bool reading = false;
  bool writing = false;
  bool finished = false;

 private:
  const PeerFacts peer_{"10.0.0.2:9", true, {"node-0", "node-1"}};
};

class Life {
 public:
  explicit Life(Bytes input)
      : input_(input),
        agent_(clock_, {{100, 2'000, 10'000}, {}, {membership::kLocalNode, {{"host:0", {}}}, "node-a", "A"}}),
        coordinator_(self(), {{}, 10'000, 1, [this] { return ++last_number_; }},
                     [this](const SocketAddress&, std::function<void(bool)> answer) {
                       if (probes_.size() < 8) probes_.push_back(std::move(answer));
                     }) {}

  void run() {
    while (!input_.empty()) {
      step();
      const View view = coordinator_.view();
      require(!view.nodes.empty() && view.nodes.size() <= 3, "its own node and those of the certificate");
    }
  }

 private:
  Self self() {
    settings_ = {"c", "node-a", "127.0.0.1:1", "node-a:1", "node-a:1", {}, "", "", "", true, 100, 2'000};
    Self self{settings_, clock_, refusals_, {}, agent_};
    self.description.set_name("node-a");
    self.description.set_boot_id(std::string(16, 'A'));
    return self;
  }

  void step() {
    const std::uint8_t what = input_.byte();
    if (streams_.empty() || what % 8 == 0) {
      if (streams_.size() < 6) {
        streams_.push_back(std::make_shared<FuzzStream>());
        coordinator_.on_opened(streams_.back());
      }
      return;
    }
    FuzzStream& stream = *streams_[what / 8 % streams_.size()];
    switch (what % 8) {
      case 1:
      case 2: say(stream, parse_frame(input_.text(input_.byte() * 4), kMaxNodeFrameBytes)); break;
      case 3: say(stream, hello()); break;
      case 4: say(stream, message()); break;
      case 5:
        if (!stream.finished && stream.writing) {
          stream.writing = false;
          coordinator_.on_written(stream);
        }
        break;
      case 6:
        if (!stream.finished) {
          stream.finished = true;
          coordinator_.on_closed(stream, {StatusCode::kAborted, "gone"});
        }
        break;
      default:
        clock_.advance_ms(input_.byte() * 16);
        agent_.tick();
        coordinator_.tick();
        (void)agent_.take_actions();
        if (!probes_.empty()) {
          const auto answer = std::move(probes_.front());
          probes_.pop_front();
          answer(input_.byte() % 2 == 0);
        }
    }
  }

  void say(FuzzStream& stream, const Result<v1::Frame>& frame) {
    if (stream.finished || !stream.reading) return;
    stream.reading = false;
    coordinator_.on_frame(stream, frame);
  }

  // Nearly right, so that what follows is reached.
  v1::Frame hello() {
    v1::Frame frame;
    v1::Hello& hello = *frame.mutable_hello();
    const std::uint8_t how = input_.byte();
    hello.set_version_min(kVersionMin);
    hello.set_version_max(kVersionMax - 1 + (how % 8 != 0));
    hello.set_cluster("c");
    hello.mutable_node()->set_name("node-" + std::to_string(how % 4));
    hello.mutable_node()->set_boot_id(std::string(16, static_cast<char>('0' + how / 4 % 2)));
    hello.mutable_node()->set_address("h:1");
    hello.mutable_node()->set_listen("127.0.0.1:1");
    hello.set_term(how / 8 % 4);
    hello.set_coordinator_boot_id(std::string(16, how % 3 == 0 ? 'A' : 'B'));
    hello.set_channel(input_.byte());
    hello.set_received(input_.byte() % 4);
    return frame;
  }

  v1::Frame message() {
    v1::Frame frame;
    v1::ChannelMessage& message = *frame.mutable_message();
    message.set_term(coordinator_.view().term - input_.byte() % 8 / 7);
    message.set_boot_id(std::string(16, static_cast<char>('0' + input_.byte() % 2)));
    message.set_number(input_.byte() % 4);
    message.set_acknowledged(input_.byte() % 4);
    if (message.number() != 0) message.set_payload(payload());
    return frame;
  }

  std::string payload() {
    const std::uint8_t how = input_.byte();
    if (how % 4 == 0) return input_.text(how / 4);
    v1::NodeMessage content;
    const std::uint64_t term = coordinator_.view().term;
    membership::ToCoordinator said{how / 4 % 4 == 0 ? 0 : term,
                                   membership::AgentHeartbeat{how / 16 % 2 == 0}};
    if (how % 4 == 1) {
      membership::Attach attach;
      attach.attempt = input_.byte();
      attach.number = input_.byte() % 4;
      attach.devices.push_back({"host:0", {}});
      attach.engines.push_back({input_.byte() % 2u, "x"});
      said.body = attach;
    } else if (how % 4 == 2) {
      membership::JoinRequest join;
      join.id = {{0, input_.byte() % 3u}, input_.byte()};
      join.join.group[0] = 'g';
      join.join.rank = input_.byte() % 3 - 1;
      join.join.shape = {
          2, 2, 16, 128, 2, 2, abi::Payload::kBf16, abi::IndexType::kInt32, abi::LossPolicy::kFailFast};
      join.join.shape.span = abi::Span::kCluster;
      input_.dent(join.join.shape);
      said.body = membership::Told{join};
    }
    content.set_to_coordinator(encode(said, kMaxNodeFrameBytes));
    // All other messages of an agent are a field of the same message away.
    std::string bytes = content.SerializeAsString();
    if (how >= 0xc0 && !bytes.empty()) bytes[input_.byte() % bytes.size()] = static_cast<char>(input_.byte());
    return bytes;
  }

  Bytes input_;
  ManualClock clock_;
  Refusals refusals_;
  Settings settings_;
  std::deque<std::function<void(bool)>> probes_;
  std::vector<std::shared_ptr<FuzzStream>> streams_;
  std::uint64_t last_number_ = 0;
  membership::Agent agent_;
  CoordinatorSide coordinator_;
};

}  // namespace
}  // namespace epd::test

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  epd::log_set_levels(epd::LogLevel::kOff);
  epd::test::Life(epd::test::Bytes(data, size)).run();
  return 0;
}
