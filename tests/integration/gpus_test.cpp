// The daemon's reports of its GPUs, and how it runs where something is missing. Under the fake driver.
#include "support/client.h"
#include "support/cuda_memory.h"
#include "support/daemon.h"
#include "support/ranks.h"

#include <gtest/gtest.h>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

namespace epd::test {
namespace {

using nlohmann::json;

class Gpus : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_cuda_driver()) GTEST_SKIP() << "no CUDA driver to be opened here";
    if (std::getenv("EPD_TEST_GPUS") != nullptr) GTEST_SKIP() << "true GPUs lack what they lack";
  }
  void start(const char* variable, const char* value,
             std::vector<std::pair<std::string, std::string>> settings,
             std::optional<std::string> device_lines = std::nullopt) {
    ::setenv(variable, value, 1);
    DaemonOptions options;
    use_devices(options, "cuda");
    options.devices = device_lines ? 4 : 3;
    options.device_lines = std::move(device_lines);
    options.settings = std::move(settings);
    daemon_ = std::make_unique<Daemon>(std::move(options));
    const bool started = daemon_->start();
    ::unsetenv(variable);
    ASSERT_TRUE(started);
  }
  void TearDown() override {
    if (daemon_ != nullptr && daemon_->running()) daemon_->stop();
  }
  json epctl(std::vector<std::string> arguments, int exit_code) const {
    arguments.emplace_back("--json");
    const CommandResult result = daemon_->epctl(arguments);
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    return json::parse(result.out, nullptr, false);
  }
  json check(const std::string& name, int exit_code) const {
    const json findings = epctl({"doctor"}, exit_code);
    for (const json& each : findings["checks"]) {
      if (each["name"] == name) return each;
    }
    ADD_FAILURE() << "no check " << name;
    return {};
  }
  // "cuda:0, host:0"
  std::string served() const {
    std::string text;
    const json all = epctl({"devices"}, 0);
    for (const json& device : all["devices"])
      text += (text.empty() ? "" : ", ") + device["name"].get<std::string>();
    return text;
  }
  // The device of a session that names none.
  std::string device_of_choice() const {
    struct Name {
      char text[64];
    };
    Shared<Name> device;
    RankProcess client([&]() -> std::string {
      const Session session(daemon_->socket(), "");
      epd_session_info_t info;
      epd_session_info_init(&info);
      must(epd_session_info(session.get(), &info), "info");
      std::snprintf(device->text, sizeof(device->text), "%s", info.device);
      return "";
    });
    const RankOutcome outcome = client.wait(30);
    EXPECT_TRUE(outcome.ok) << outcome.to_string();
    return device->text;
  }
  bool logged(const std::string& text) const { return daemon_->log().find(text) != std::string::npos; }

  // Two ranks, one on each; what the second one's join gives, and what is said of it.
  std::string join_on(std::uint32_t first, std::uint32_t second, std::int32_t timeout_ms,
                      epd_status_t* status) const {
    Shared<Gate> over;
    const auto config = [timeout_ms](std::uint32_t rank) {
      epd_group_config_t c = small_config("pair", rank, 2);
      c.timeout_ms = timeout_ms;
      return c;
    };
    RankProcess partner([&]() -> std::string {
      const Session session(daemon_->socket(), daemon_->device(first));
      const epd_group_config_t c = config(0);
      epd_group_t* handle = nullptr;
      if (epd_group_join(session.get(), &c, &handle) == EPD_OK) over->wait_for(1);
      const Group group(handle);
      return "";
    });
    Shared<std::atomic<int>> result;
    RankProcess joiner([&]() -> std::string {
      const Session session(daemon_->socket(), daemon_->device(second));
      const epd_group_config_t c = config(1);
      epd_group_t* handle = nullptr;
      RANK_CHECK(
          eventually(20, [&] { return daemon_->epctl({"groups"}).out.find("pair") != std::string::npos; }),
          "the partner waits");
      *result = epd_group_join(session.get(), &c, &handle);
      std::string said = *result == EPD_OK ? "" : epd_last_error();
      const Group group(handle);
      over->open();
      return said;
    });
    const RankOutcome outcome = joiner.wait(40);
    EXPECT_TRUE(outcome.ok) << outcome.to_string();
    over->open();
    EXPECT_TRUE(partner.wait(40).ok);
    *status = static_cast<epd_status_t>(result->load());
    return outcome.text;
  }

  std::unique_ptr<Daemon> daemon_;
};

TEST_F(Gpus, AreDescribed) {
  start("EPD_FAKE_CUDA_MPS", "1", {{"mps.control", "\"/no/such/program\""}});
  const json devices = epctl({"devices"}, 0)["devices"];
  ASSERT_EQ(devices.size(), 3u);
  const json& gpu = devices[1]["cuda"];
  EXPECT_EQ(gpu["model"], "NVIDIA H200 (fake)");
  EXPECT_EQ(gpu["compute_capability"], "9.0");
  EXPECT_EQ(gpu["cuda_version"].get<std::string>().substr(0, 3), "13.");
  EXPECT_EQ(gpu["num_sms"], 132);
  EXPECT_EQ(gpu["mps"], true);
  EXPECT_EQ(gpu["unreachable"].size(), 0u);
  const std::string text = daemon_->epctl({"devices"}).out;
  EXPECT_NE(text.find("NO P2P WITH"), std::string::npos) << text;
  for (const char* name : {"gpu cuda:2", "mps", "peer_access"})
    EXPECT_EQ(check(name, 0)["level"], "ok") << name;
  EXPECT_TRUE(eventually(10, [&] { return logged("MPS can't be asked to terminate work"); }));
  const json control = check("mps_control", 0);
  EXPECT_EQ(control["level"], "warn") << "its program is not there";
  EXPECT_NE(control["text"].get<std::string>().find("/no/such/program"), std::string::npos);
}

TEST_F(Gpus, WithoutMpsItRunsAndSaysWhatThatCosts) {
  start("EPD_FAKE_CUDA_MPS", "0", {});  // every device has answered a noop
  EXPECT_TRUE(logged("each hand-off between them costs some 140 to 280 us"));
  const json mps = check("mps", 0);
  EXPECT_EQ(mps["level"], "warn");
  EXPECT_NE(mps["advice"].get<std::string>().find("nvidia-cuda-mps-control -d"), std::string::npos);
  EXPECT_EQ(epctl({"status"}, 0)["daemon"]["mps_control_error"], "") << "there is nobody to ask";
  epd_status_t status = EPD_INTERNAL;
  EXPECT_EQ(join_on(0, 2, 20000, &status), "");
  EXPECT_EQ(status, EPD_OK);
}

TEST_F(Gpus, AutoServesTheMachinesGpus) {
  start("EPD_FAKE_CUDA_DEVICES", "2", {}, "devices.host = 1\n");
  EXPECT_EQ(served(), "cuda:0, cuda:1, host:0");
  for (int i = 0; i < 4; ++i) EXPECT_EQ(device_of_choice().substr(0, 5), "cuda:") << "never the host device";
  epd_status_t status = EPD_INTERNAL;
  EXPECT_EQ(join_on(0, 1, 20000, &status), "");
  EXPECT_EQ(status, EPD_OK);
}

TEST_F(Gpus, AutoWithoutGpusServesAHostDevice) {
  start("EPD_FAKE_CUDA_DEVICES", "0", {}, "");
  EXPECT_EQ(served(), "host:0");
  EXPECT_EQ(device_of_choice(), "host:0");
}

TEST_F(Gpus, AListServesThoseAlone) {
  start("EPD_FAKE_CUDA_DEVICES", "4", {},
        "devices.cuda = [1, \"GPU-fa4e4750-5520-6f66-206e-6f206b657204\"]\n");
  EXPECT_EQ(served(), "cuda:1, cuda:3");
  EXPECT_EQ(epctl({"devices"}, 0)["devices"][1]["cuda"]["uuid"], "GPU-fa4e4750-5520-6f66-206e-6f206b657204");
  epd_status_t status = EPD_INTERNAL;
  EXPECT_EQ(join_on(1, 3, 20000, &status), "");
  EXPECT_EQ(status, EPD_OK);
}

TEST_F(Gpus, AMachineWhoseGpusCanNotBeUsedIsNotServedByItsProcessors) {
  const struct {
    const char* variable;
    const char* value;
    std::vector<const char*> said;
  } cases[] = {
      {"EPD_FAKE_CUDA_FAIL",
       "cuDeviceGetCount:1:802",
       {"devices.cuda is \"auto\" and the GPUs can't be used", "CUDA_ERROR_SYSTEM_NOT_READY"}},
      {"EPD_FAKE_CUDA_HOST_NUMA",
       "0",
       {"devices.cuda is \"auto\" and no GPU can be used: cuda:0 has no memory of the host by file "
        "descriptor",
        "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"}},
  };
  const std::string directory = ::testing::TempDir() + "epd-gpus-" + std::to_string(::getpid());
  for (const auto& [variable, value, said] : cases) {
    ::setenv(variable, value, 1);
    const CommandResult result =
        run_command({daemon_program(), "serve", "--config", "/dev/null", "--socket", directory + "/a.sock",
                     "--control-socket", directory + "/c.sock"},
                    10);
    ::unsetenv(variable);
    EXPECT_EQ(result.exit_code, 1) << result.err;
    EXPECT_NE(result.err.find("devices.cuda = \"none\""), std::string::npos) << result.err;
    for (const char* part : said) EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
  }
}

TEST_F(Gpus, WithoutAWayBetweenTwoAGroupOnBothIsRefused) {
  start("EPD_FAKE_CUDA_NO_PEER", "0-2", {});
  EXPECT_TRUE(logged("two GPUs can't map each other's memory"));
  const json peers = check("peer_access", 4);
  EXPECT_EQ(peers["level"], "fail");
  EXPECT_NE(peers["text"].get<std::string>().find("cuda:0 and cuda:2:"), std::string::npos);
  EXPECT_EQ(epctl({"devices"}, 0)["devices"][0]["cuda"]["unreachable"], json::array({"cuda:2"}));
  epd_status_t status = EPD_OK;
  const std::string said = join_on(0, 2, 3000, &status);  // after which the first one gives up
  EXPECT_EQ(status, EPD_UNSUPPORTED) << said;
  for (const char* part : {"cuda:2 can't map the memory of cuda:0", "no P2P", "rank 0 of group \"pair\""})
    EXPECT_NE(said.find(part), std::string::npos) << said;
  EXPECT_EQ(join_on(0, 1, 20000, &status), "");
  EXPECT_EQ(status, EPD_OK) << "others meet as ever";
}

// As GPUs of compute capability 8.6 and 8.9 have it. The rows of this group fit into shared memory, and what
// an inbox needs beside them does not.
TEST_F(Gpus, WithLittleSharedMemoryAGroupWhoseInboxDoesNotFitIsRefused) {
  start("EPD_FAKE_CUDA_SHARED_MEMORY", "101376", {}, "devices.cuda = [0]\n");
  const pid_t engine = daemon_->engine(0);
  RankProcess client([&]() -> std::string {
    const Session session(daemon_->socket(), daemon_->device(0));
    epd_group_config_t c = small_config("wide", 0, 1);
    c.layout = EPD_LAYOUT_PACKED;
    c.num_experts = 2048;
    c.topk = 8;
    c.hidden = 6144;
    c.max_tokens = 128;
    c.max_recv_rows = 1024;
    epd_group_t* handle = nullptr;
    const epd_status_t status = epd_group_join(session.get(), &c, &handle);
    const std::string said = epd_last_error();
    RANK_CHECK(status == EPD_UNSUPPORTED, std::string(epd_status_name(status)) + ": " + said);
    c.max_tokens = 513;  // too many for an inbox
    c.max_recv_rows = 4104;
    const Group group(session, c);
    return said;
  });
  const RankOutcome outcome = client.wait(40);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
  for (const char* part : {"can't hold rows of 12288 bytes, 1 ranks, 2048 experts, 128 tokens",
                           "101376 bytes of an SM's shared memory"})
    EXPECT_NE(outcome.text.find(part), std::string::npos) << outcome.text;
  EXPECT_EQ(daemon_->engine(0), engine) << "the engine has died";
}

}  // namespace
}  // namespace epd::test
