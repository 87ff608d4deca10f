// The parts that epctl is made of: doctor's rules, units, tables, JSON.
#include "doctor.h"
#include "format.h"
#include "render.h"
#include "socket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <cstdint>
#include <string>
#include "epd/v1/control.pb.h"

namespace epd::ctl {
namespace {

TEST(CtlDevices, TellHowOftenAGpuBeganNoKernel) {
  v1::ListDevicesResponse devices;
  v1::Device& device = *devices.add_devices();
  device.set_name("cuda:0");
  device.set_times_stuck(2413);
  EXPECT_EQ(render(devices).find("STUCK"), std::string::npos) << "no GPU";
  device.mutable_cuda()->set_mps(true);
  EXPECT_NE(render(devices).find("STUCK"), std::string::npos);
  EXPECT_NE(render(devices).find(" 2413"), std::string::npos) << render(devices);
}

// It said that no GPU was found, whatever the machine has.
TEST(CtlDoctorRules, AnEpdWithoutKernelsWasTakenForAMachineWithoutGpus) {
  v1::GetConfigResponse config;
  for (const char* key : {"devices.cuda", "devices.host"}) {
    v1::ConfigEntry& entry = *config.add_entries();
    entry.set_key(key);
    entry.set_value("auto");
  }
  DaemonFacts daemon;
  daemon.status.add_devices()->set_name("host:0");
  ASSERT_EQ(judge_choice(config, daemon).size(), 1u);
  EXPECT_THAT(judge_choice(config, daemon)[0].text, testing::HasSubstr("built without kernels for GPUs"));
  daemon.version.set_cuda_kernels(true);
  ASSERT_EQ(judge_choice(config, daemon).size(), 1u);
  EXPECT_THAT(judge_choice(config, daemon)[0].text, testing::HasSubstr("no GPU was found"));
}

TEST(CtlDoctorRules, HostSettings) {
  HostFacts good;
  good.cores = 64;
  good.open_files = 65536;
  good.locked_bytes = kUnlimited;
  good.shmem_huge = "advise";
  good.memory_bytes = std::uint64_t{64} << 30;
  good.available_bytes = std::uint64_t{60} << 30;
  v1::GetStatusResponse status;
  v1::Device& device = *status.add_devices();
  device.set_name("host:0");
  device.set_sms(2);
  status.mutable_daemon()->set_sessions(4);
  for (const Check& check : judge_host(good, status)) {
    EXPECT_EQ(check.level, Level::kOk) << check.name << ": " << check.text;
    EXPECT_EQ(check.advice, "") << check.name;
  }
  const auto level = [&](const HostFacts& host, const std::string& name) {
    for (const Check& check : judge_host(host, status)) {
      if (check.name != name) continue;
      EXPECT_EQ(check.advice.empty(), check.level == Level::kOk) << name;
      return check.level;
    }
    ADD_FAILURE() << "no check " << name;
    return Level::kOk;
  };
  HostFacts host = good;
  host.cores = 5;
  EXPECT_EQ(level(host, "cores"), Level::kWarn);
  host.cores = 6;
  EXPECT_EQ(level(host, "cores"), Level::kOk);
  host.cpu_quota = 1.5;
  EXPECT_EQ(level(host, "cores"), Level::kWarn);
  host.open_files = 256;
  EXPECT_EQ(level(host, "open_files"), Level::kWarn);
  host.memfd_error = "memfd_create: Operation not permitted";
  EXPECT_EQ(level(host, "shared_memory"), Level::kFail);
  host.shmem_huge = "never";
  EXPECT_EQ(level(host, "huge_pages"), Level::kWarn);
  host.shmem_huge = "";
  EXPECT_EQ(level(host, "huge_pages"), Level::kOk);
  host.available_bytes = std::uint64_t{1} << 30;
  EXPECT_EQ(level(host, "memory"), Level::kWarn);
  host.swap_bytes = 4096;
  EXPECT_EQ(level(host, "swap"), Level::kWarn);
  host.locked_bytes = 65536;
  EXPECT_EQ(level(host, "locked_memory"), Level::kOk) << "host devices lock nothing";
  device.set_name("cuda:0");
  EXPECT_EQ(level(host, "locked_memory"), Level::kWarn);
}

TEST(CtlDoctorRules, DeviceStates) {
  const auto level = [](v1::DeviceState state, std::uint32_t restarts, std::uint64_t heartbeat_ms) {
    v1::GetStatusResponse status;
    v1::Device& device = *status.add_devices();
    device.set_name("host:0");
    device.set_state(state);
    device.set_restarts(restarts);
    device.set_heartbeat_age_ms(heartbeat_ms);
    return judge_devices(status).at(0).level;
  };
  EXPECT_EQ(level(v1::DEVICE_STATE_READY, 0, 5), Level::kOk);
  EXPECT_EQ(level(v1::DEVICE_STATE_READY, 1, 5), Level::kWarn);
  EXPECT_EQ(level(v1::DEVICE_STATE_READY, 0, 60'000), Level::kFail);
  EXPECT_EQ(level(v1::DEVICE_STATE_STARTING, 0, 0), Level::kWarn);
  EXPECT_EQ(level(v1::DEVICE_STATE_RESTARTING, 1, 0), Level::kFail);
  EXPECT_EQ(level(v1::DEVICE_STATE_FAILED, 9, 0), Level::kFail);
  EXPECT_EQ(level(v1::DEVICE_STATE_STOPPED, 0, 4'000), Level::kFail);
  EXPECT_EQ(level(static_cast<v1::DeviceState>(77), 0, 0), Level::kWarn);
  EXPECT_EQ(judge_devices({}).at(0).level, Level::kFail) << "a daemon without devices serves nobody";
}

// A check by its name; kOk and a failure of the test if there is none.
Check check_named(const std::vector<Check>& checks, const std::string& name) {
  for (const Check& check : checks) {
    if (check.name != name) continue;
    EXPECT_EQ(check.advice.empty(), check.level == Level::kOk) << name;
    return check;
  }
  ADD_FAILURE() << "no check " << name;
  return {};
}

TEST(CtlDoctorRules, Gpus) {
  v1::GetStatusResponse status;
  status.add_devices()->set_name("host:0");
  EXPECT_TRUE(judge_gpus(status).empty());
  for (const char* name : {"cuda:0", "cuda:1", "cuda:2"}) {
    v1::Device& device = *status.add_devices();
    device.set_name(name);
    v1::CudaDevice& gpu = *device.mutable_cuda();
    gpu.set_model("NVIDIA H200");
    gpu.set_compute_capability("9.0");
    gpu.set_cuda_version("13.0");
    gpu.set_num_sms(132);
    gpu.set_mps(true);
  }
  const auto check = [&](const std::string& name) { return check_named(judge_gpus(status), name); };
  for (const char* name : {"gpu cuda:0", "gpu cuda:2", "mps", "mps_control", "peer_access"})
    EXPECT_EQ(check(name).level, Level::kOk) << name;
  EXPECT_NE(check("gpu cuda:1").text.find("NVIDIA H200, compute capability 9.0, 132 SMs, CUDA 13.0"),
            std::string::npos);

  status.mutable_daemon()->set_mps_control_error("exit 1, Cannot find MPS control daemon process");
  EXPECT_EQ(check("mps_control").level, Level::kWarn);
  EXPECT_NE(check("mps_control").text.find("Cannot find MPS"), std::string::npos);
  status.mutable_devices(3)->mutable_cuda()->set_mps(false);
  EXPECT_EQ(check("mps").level, Level::kWarn) << "the daemon runs all the same";
  EXPECT_NE(check("mps").text.find("cuda:2 without MPS"), std::string::npos);
  EXPECT_NE(check("mps").text.find("280 us"), std::string::npos);
  for (v1::Device& device : *status.mutable_devices()) {
    if (device.has_cuda()) device.mutable_cuda()->set_mps(false);
  }
  for (const Check& each : judge_gpus(status))
    EXPECT_NE(each.name, "mps_control") << "there is nobody to ask";

  status.mutable_devices(1)->mutable_cuda()->add_unreachable("cuda:2");
  status.mutable_devices(3)->mutable_cuda()->add_unreachable("cuda:0");
  EXPECT_EQ(check("peer_access").level, Level::kFail);
  EXPECT_NE(check("peer_access").text.find("cuda:0 and cuda:2:"), std::string::npos) << "each pair once";
}

TEST(CtlDoctorRules, RowsThatAreCopiedHaveARemedy) {
  const auto checks = [](std::uint64_t in_place, const std::string& why, std::uint64_t copied) {
    v1::ListGroupsResponse groups;
    v1::Group& group = *groups.add_groups();
    group.set_name("layer");
    v1::GroupMember& member = *group.add_members();
    member.set_rank(3);
    for (const auto& [where, times] :
         {std::pair(std::string("in_place"), in_place), std::pair(why, copied)}) {
      v1::RowCount& count = *member.add_rows();
      count.set_where(where);
      count.set_times(times);
    }
    return judge_rows(groups);
  };
  EXPECT_TRUE(checks(100, "not_mappable", 800).empty()) << "few";
  EXPECT_TRUE(checks(9500, "not_mappable", 500).empty()) << "a small share";
  EXPECT_TRUE(checks(0, "first_calls", 9000).empty());
  for (const char* why : {"not_mappable", "limit", "no_room", "unaligned", "unknown_rows"}) {
    const std::vector<Check> said = checks(500, why, 1500);
    ASSERT_EQ(said.size(), 1u) << why;
    EXPECT_EQ(said[0].level, Level::kWarn);
    EXPECT_EQ(said[0].name, "rows of layer");
    EXPECT_EQ(said[0].text, std::string("rank 3 had rows copied 1500 times: ") + why);
    EXPECT_FALSE(said[0].advice.empty());
  }
}

TEST(CtlDoctorRules, VersionsAndSockets) {
  DaemonFacts daemon;
  daemon.control_path = "/run/epd/control.sock";
  daemon.attach_path = "/run/epd/epd.sock";
  daemon.control_file.kind = SocketFile::Kind::kUsable;
  daemon.control_file.mode = 0660;
  daemon.attach_file = daemon.control_file;
  daemon.version.set_version("0.1.0");
  daemon.version.set_layout_hash("aa");
  daemon.status.mutable_daemon()->set_state(v1::DAEMON_STATE_SERVING);
  const v1::GetVersionResponse own = daemon.version;
  const auto level = [&](const std::string& name) {
    for (const Check& check : judge_daemon(daemon, own))
      if (check.name == name) return check.level;
    ADD_FAILURE() << "no check " << name;
    return Level::kOk;
  };
  for (const char* name : {"control_socket", "daemon", "version", "abi", "state", "attach_socket"}) {
    EXPECT_EQ(level(name), Level::kOk) << name;
  }
  daemon.version.set_version("0.2.0");
  EXPECT_EQ(level("version"), Level::kWarn);
  daemon.version.set_layout_hash("bb");
  EXPECT_EQ(level("abi"), Level::kFail);
  daemon.attach_file.mode = 0666;
  EXPECT_EQ(level("attach_socket"), Level::kWarn);
  daemon.attach_file.kind = SocketFile::Kind::kForbidden;
  EXPECT_EQ(level("attach_socket"), Level::kFail);
  daemon.status.mutable_daemon()->set_state(v1::DAEMON_STATE_DRAINING);
  EXPECT_EQ(level("state"), Level::kWarn);
  daemon.open_files = 256;
  EXPECT_EQ(level("daemon_open_files"), Level::kWarn);
  daemon.open_files = kUnlimited;
  EXPECT_EQ(level("daemon_open_files"), Level::kOk);
}

// Doctor had the answer of a daemon, and said that it is to be started.
TEST(CtlDoctorRules, ADaemonThatRunsWithoutItsSocketIsToBeRestarted) {
  DaemonFacts daemon;
  daemon.attach_path = "/run/epd/epd.sock";
  const auto said = [&] {
    for (const Check& check : judge_daemon(daemon, v1::GetVersionResponse()))
      if (check.name == "attach_socket") return check.text + " -> " + check.advice;
    return std::string();
  };
  EXPECT_THAT(said(),
              testing::HasSubstr("epd runs, but /run/epd/epd.sock does not exist here -> if somebody"));
  EXPECT_THAT(said(), testing::HasSubstr("restart epd"));
  daemon.status.mutable_daemon()->set_socket_problem("/run/epd/epd.sock has been replaced");
  daemon.attach_file.kind = SocketFile::Kind::kUsable;
  EXPECT_EQ(said(), "/run/epd/epd.sock has been replaced -> restart epd");
  daemon.status.Clear();
  daemon.attach_file.kind = SocketFile::Kind::kMissing;
  daemon.failure = Failure{Exit::kUnreachable, "UNAVAILABLE", "nobody"};
  EXPECT_THAT(said(), testing::HasSubstr("-> start epd"));
}

TEST(CtlSocketFile, NobodyIsToldToJoinGroupRoot) {
  SocketFile file;
  file.mode = 0660;
  EXPECT_THAT(how_to_get_in(file, "daemon.socket_group"),
              testing::HasSubstr("may open it: daemon.socket_group"));
  EXPECT_THAT(how_to_get_in(file, ""), testing::Not(testing::HasSubstr("join group")));
  file.gid = 62001;
  EXPECT_THAT(how_to_get_in(file, ""), testing::HasSubstr("join group 62001, or use sudo"));
}

TEST(CtlRender, AProcessOfAnotherPidNamespaceIsMarkedAsAClaim) {
  v1::ListSessionsResponse sessions;
  v1::Session& foreign = *sessions.add_sessions();
  foreign.set_claimed_pid(4711);
  foreign.set_claimed_host("node7");
  v1::Session& own = *sessions.add_sessions();
  own.set_pid(4242);
  own.set_claimed_pid(1);
  const std::string text = render(sessions);
  EXPECT_NE(text.find("4711@node7?"), std::string::npos) << text;
  EXPECT_NE(text.find("4242"), std::string::npos) << text;
  EXPECT_EQ(text.find("1@"), text.find("1@node7")) << "the kernel's number is enough";
}

TEST(CtlNumbers, AreDecimalWithoutLeadingZeros) {
  EXPECT_EQ(parse_whole("0"), 0u);
  EXPECT_EQ(parse_whole("18446744073709551615"), UINT64_MAX);
  for (const char* text : {"", "00", "010", "0x1", "-1", "+1", " 1", "1 ", "1e3", "18446744073709551616"})
    EXPECT_EQ(parse_whole(text), std::nullopt) << text;
  EXPECT_EQ(refuse_whole("7", 1, 7), "");
  EXPECT_NE(refuse_whole("8", 1, 7).find("\"8\" is refused; allowed: 1..7"), std::string::npos);
  for (const char* text : {"1", "0.5", ".5", "2.", "3600"})
    EXPECT_EQ(refuse_seconds(text, 0.05, 3600, ""), "");
  for (const char* text : {"", ".", "nan", "inf", "-1", "01", "1e1", "0x1", "1.2.3", "0", "3601"})
    EXPECT_NE(refuse_seconds(text, 0.05, 3600, ""), "") << text;
}

TEST(CtlUnits, AreReadable) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(4096), "4.0 KiB");
  EXPECT_EQ(format_bytes((1u << 20) - 1), "1.0 MiB");
  EXPECT_EQ(format_bytes(std::uint64_t{600} << 20), "600.0 MiB");
  EXPECT_EQ(format_bytes(~std::uint64_t{0}), "16.0 EiB");
  EXPECT_EQ(format_ms(0), "0 ms");
  EXPECT_EQ(format_ms(999), "999 ms");
  EXPECT_EQ(format_ms(12'345), "12.3 s");
  EXPECT_EQ(format_ms(59'999), "1 m 0 s");
  EXPECT_EQ(format_ms(250'000), "4 m 10 s");
  EXPECT_EQ(format_ms(3'723'000), "1 h 2 m");
  EXPECT_EQ(format_ms(std::uint64_t{76} * 3'600'000), "3 d 4 h");
  EXPECT_EQ(counted(0, "group") + ", " + counted(1, "group") + ", " + counted(2, "group"),
            "0 groups, 1 group, 2 groups");
  EXPECT_EQ(format_us(850), "850 us");
  EXPECT_EQ(format_us(1500), "1.5 ms");
  EXPECT_EQ(format_us(999'999), "999 ms");
  EXPECT_EQ(format_us(2'000'000), "2.0 s");
}

TEST(CtlTable, AlignsAndKeepsTheTerminalSafe) {
  Table table({{"NAME"}, {"N", Align::kRight}, {"LAST"}});
  table.add({"a", "100", "x"});
  table.add({"\xc3\xa4\xc3\xb6", "7"});
  table.add({"\x1b[2J\n\xc2\x9b", "1", "y"});
  EXPECT_EQ(table.text(),
            "NAME               N  LAST\n"
            "a                100  x\n"
            "\xc3\xa4\xc3\xb6                 7  -\n"
            "\\x1b[2J\\x0a\\x9b    1  y\n");
}

TEST(CtlJson, CarriesEveryFieldUnderItsName) {
  v1::DrainResponse empty;
  EXPECT_EQ(to_json(empty).dump(), R"({"daemon":null})");
  v1::Operation operation;
  operation.set_ticket(~std::uint64_t{0});
  operation.set_waiting_for(-1);
  operation.set_stage(v1::OPERATION_STAGE_WAIT_ARRIVED);
  const Json json = to_json(operation);
  EXPECT_EQ(json.size(), static_cast<std::size_t>(v1::Operation::descriptor()->field_count()));
  EXPECT_EQ(json["ticket"], ~std::uint64_t{0});
  EXPECT_EQ(json["waiting_for"], -1);
  EXPECT_EQ(json["stage"], "wait_arrived");
  EXPECT_EQ(json["op"], "unspecified");
  EXPECT_EQ(word(static_cast<v1::GroupState>(99)), "unspecified");
}

}  // namespace
}  // namespace epd::ctl
