// epctl size: what a group would take. There is no daemon.
#include "ctl_fixture.h"
#include "proto/group_bytes.h"

namespace epd::ctl {
namespace {

const std::vector<std::string> kShape{"size",     "--ranks",  "8",        "--experts", "256",
                                      "--hidden", "7168",     "--tokens", "128",       "--topk",
                                      "8",        "--layout", "expert",   "--payload", "fp8_cast"};

std::vector<std::string> with(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), kShape.begin(), kShape.end());
  return arguments;
}

abi::GroupShape shape() {
  abi::GroupShape shape{};
  shape.num_ranks = 8;
  shape.num_experts = 256;
  shape.hidden = 7168;
  shape.max_tokens = 128;
  shape.topk = 8;
  shape.depth = 4;
  shape.layout = abi::Layout::kExpert;
  shape.payload = abi::Payload::kFp8Cast;
  return shape;
}

TEST_F(CtlTest, SizeIsWhatTheRulesOfTheDaemonSay) {
  const abi::GroupBytes bytes(shape(), false);
  const Json document = epctl(with({"--json"})).json();
  ASSERT_TRUE(document.is_object());
  const Json& rank = document["rank"];
  EXPECT_EQ(rank["user_arena_bytes"], bytes.user_arena);
  EXPECT_EQ(rank["exchange_arena_bytes"], bytes.exchange_arena);
  EXPECT_EQ(rank["routing_records_bytes"], bytes.routing_records);
  EXPECT_EQ(rank["inboxes_bytes"], bytes.inboxes);
  EXPECT_GT(rank["inboxes_bytes"], 0u);
  EXPECT_EQ(rank["board_bytes"], bytes.board);
  EXPECT_EQ(rank["results_bytes"], bytes.results);
  EXPECT_GT(rank["results_bytes"], 0u);
  EXPECT_EQ(rank["total_bytes"], bytes.rank);
  EXPECT_EQ(rank["routing_quota_bytes"], 0u);
  EXPECT_EQ(document["group"]["total_bytes"], 8 * bytes.rank);
  EXPECT_EQ(document["slot"]["x_bytes"], 128u * 7168 * 2);
  EXPECT_EQ(document["slot"]["bias[0]_bytes"], 0u);
  EXPECT_EQ(document["shape"]["payload"], "fp8_cast");
  EXPECT_EQ(document["shape"]["layout"], "expert");
  EXPECT_EQ(document["shape"]["depth"], 4u);
  EXPECT_EQ(document["device_kind"], "cuda");

  const Json host = epctl(with({"--json", "--device-kind", "host"})).json();
  ASSERT_TRUE(host.is_object());
  EXPECT_EQ(host["rank"]["user_arena_bytes"], bytes.user_arena);
  EXPECT_EQ(host["rank"]["results_bytes"], bytes.results);
  EXPECT_EQ(host["rank"]["total_bytes"], bytes.rank);
  EXPECT_EQ(host["rank"]["routing_quota_bytes"], abi::GroupBytes(shape(), true).routing_quota);
}

TEST_F(CtlTest, SizeIsThatOfTheLargestRowFormat) {
  abi::GroupShape several = shape();
  several.num_more_formats = 2;
  several.more_formats[1] = {abi::Payload::kFp8, abi::ScaleFormat::kUe8m0};
  const Json document = epctl(with({"--json", "--more-formats", "bf16,fp8:ue8m0"})).json();
  ASSERT_TRUE(document.is_object());
  EXPECT_EQ(document["shape"]["more_formats"], Json({"bf16", "fp8:ue8m0"}));
  EXPECT_EQ(document["rank"]["total_bytes"], abi::GroupBytes(several, false).rank);
  EXPECT_EQ(document["slot"]["recv_x_bytes"], several.recv_rows() * 7168 * 2) << "bf16";
  EXPECT_EQ(document["slot"]["x_scales_bytes"], 128u * 56) << "fp8 with ue8m0";
}

TEST_F(CtlTest, SizeTellsPeopleWhereItIs) {
  const Finished cuda = epctl(with({}));
  EXPECT_EQ(cuda.exit_code, 0) << cuda.err;
  for (const char* part : {"user arena                device", "board                     host",
                           "max_arena_bytes_per_user  quota", "x                    1.8 MiB    7.0 MiB"}) {
    EXPECT_TRUE(cuda.says(part)) << part << "\n" << cuda.out;
  }
  EXPECT_FALSE(cuda.says("max_routing_bytes")) << cuda.out;
  EXPECT_FALSE(cuda.says("bias")) << "a region that the group does not have\n" << cuda.out;
  const Finished host = epctl(with({"--device-kind", "host"}));
  EXPECT_TRUE(host.says("max_routing_bytes_per_user  quota")) << host.out;
  EXPECT_FALSE(host.says("device")) << host.out;
}

TEST_F(CtlTest, SizeSaysOfWhatIsNoNumberWhatAJoinAllows) {
  for (const auto& [option, said] : {std::pair("--ranks", "--ranks: \"-8\" is refused; allowed: 1 .. 1024,"),
                                     {"--hidden", "allowed: multiples of 8, 8 .. 16384,"},
                                     {"--handles", "allowed: 0 .. 4096,"}}) {
    const Finished refused = epctl(with({option, "-8"}));
    EXPECT_EQ(refused.exit_code, 2) << option;
    EXPECT_TRUE(refused.complains(said)) << refused.err;
  }
}

TEST_F(CtlTest, SizeRefusesWhatAJoinRefuses) {
  const struct {
    std::vector<std::string> arguments;
    const char* text;
  } wrong[] = {
      {{"--more-formats", "fp8_cast"},
       "more_formats[0].payload is 1; allowed: another payload or scale_format than the group's own"},
      {{"--more-formats", "bf16,fp8,fp8:ue8m0,bf16"}, "num_more_formats is 4; allowed: 0 .. 3"},
      {{"--depth", "17"}, "depth is 17; allowed: 1 .. 16"}};
  for (const auto& w : wrong) {
    const Finished text = epctl(with(w.arguments));
    EXPECT_EQ(text.exit_code, 2) << text.out;
    EXPECT_TRUE(text.complains(std::string("epctl: ") + w.text)) << text.err;
    std::vector<std::string> in_json = w.arguments;
    in_json.emplace_back("--json");
    const Finished json = epctl(with(in_json));
    EXPECT_EQ(json.exit_code, 2);
    ASSERT_TRUE(json.json().is_object()) << json.out;
    EXPECT_EQ(json.json()["error"]["class"], "usage");
    EXPECT_EQ(json.json()["error"]["message"], w.text);
  }
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"size"}, with({"--layout", "wide"}), with({"--biases", "-1"}),
        with({"extra"})}) {
    const Finished usage = epctl(arguments);
    EXPECT_EQ(usage.exit_code, 2) << usage.out;
    EXPECT_FALSE(usage.err.empty());
  }
}

TEST_F(CtlTest, SizeCompletesItsWords) {
  const auto candidates = [this](const std::vector<std::string>& words) {
    std::vector<std::string> arguments{"complete", "--"};
    arguments.insert(arguments.end(), words.begin(), words.end());
    return Process([&] {
             std::vector<std::string> all{EPCTL_PATH};
             all.insert(all.end(), arguments.begin(), arguments.end());
             return all;
           }())
        .finish()
        .out;
  };
  EXPECT_EQ(candidates({"siz"}), "size\n");
  EXPECT_EQ(candidates({"size", "--payload", "fp8"}), "fp8_cast\nfp8\n");
  EXPECT_EQ(candidates({"size", "--device-kind", ""}), "host\ncuda\n");
  EXPECT_EQ(candidates({"size", "--max"}), "--max-recv-rows\n");
}

}  // namespace
}  // namespace epd::ctl
