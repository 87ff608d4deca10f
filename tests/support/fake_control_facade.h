// A supervisor for tests of the control plane: answers with fixed messages, or with an error.
#pragma once

#include "supervisor/control_facade.h"

#include <mutex>
#include <optional>
#include <vector>
#include "epd/v1/control.pb.h"

namespace epd::test {

class FakeControlFacade final : public supervisor::ControlFacade {
 public:
  // Two devices, two sessions, an active group of two ranks and one that forms, two operations.
  FakeControlFacade();

  Result<v1::GetStatusResponse> status() override;
  Result<std::string> boot_id() override;
  Result<supervisor::HealthFacts> health() override;
  Result<v1::ListDevicesResponse> devices() override { return answer(views_.devices); }
  Result<v1::ListSessionsResponse> sessions() override { return answer(views_.sessions); }
  Result<v1::ListGroupsResponse> groups() override { return answer(views_.groups); }
  Result<v1::ListOperationsResponse> operations() override { return answer(views_.operations); }
  Result<v1::ListNodesResponse> nodes() override { return answer(views_.nodes); }
  Result<v1::ListFarEnginesResponse> far_engines() override { return answer(views_.network); }
  Result<v1::GetConfigResponse> config() override { return answer(views_.config); }
  Status authorize(const supervisor::Operator& by, supervisor::Right wanted,
                   const std::string& what) override;
  Status drain(const supervisor::Operator& by, std::uint32_t timeout_ms) override;
  Result<v1::GetOperationResponse> operation(std::uint64_t session_id, std::uint64_t ticket) override;
  Result<v1::GetStatisticsResponse> statistics() override { return answer(views_.statistics); }
  Result<v1::GetWaitsResponse> waits(const supervisor::WaitsWanted& wanted) override;
  Result<EventBatch> events(std::uint64_t after, std::size_t limit, std::uint32_t wait_ms) override {
    return events_.read(after, limit, wait_ms);
  }
  Result<v1::ReloadConfigResponse> reload(const supervisor::Operator& by) override;
  Result<v1::SetOptionsResponse> set_options(const supervisor::Operator& by,
                                             const supervisor::OptionSettings& options) override;
  Status set_device(const supervisor::Operator& by, const std::string& device,
                    std::optional<std::uint32_t> sms) override;
  Result<v1::SetGroupResponse> set_group(const supervisor::Operator& by, const std::string& group,
                                         const supervisor::GroupSettingsChange& change) override;
  Status evict_session(const supervisor::Operator& by, std::uint64_t session_id,
                       const std::string& reason) override;
  Result<v1::EvictRankResponse> evict_rank(const supervisor::Operator& by, const std::string& group,
                                           std::uint32_t rank, const std::string& reason) override;
  Status restart_device(const supervisor::Operator& by, const std::string& device) override;
  // Sets the callers' right from now on (at the start: everything).
  void allow(supervisor::Right right);
  supervisor::Operator last_operator() const;

  EventLog& event_log() { return events_; }
  // How many questions about its state it has had.
  int questions() const;
  // The requests for changes: "set device host:0 sms=4".
  std::vector<std::string> asked() const;

  struct Views {
    v1::DaemonStatus daemon;
    v1::ListDevicesResponse devices;
    v1::ListSessionsResponse sessions;
    v1::ListGroupsResponse groups;
    v1::ListOperationsResponse operations;
    v1::ListNodesResponse nodes;
    v1::ListFarEnginesResponse network;
    v1::GetConfigResponse config;
    v1::GetStatisticsResponse statistics;
    v1::GetWaitsResponse waits;
  };
  // Calls change(views) while no call reads them.
  template <typename Change>
  void change(Change change_views) {
    const std::lock_guard lock(mutex_);
    change_views(views_);
  }
  // Every call answers so from now on; OK: with the messages again.
  void fail(Status status);
  // The timeout of the last drain that was accepted.
  std::optional<std::uint32_t> drained() const;

 private:
  template <typename T>
  Result<T> answer(const T& view) {
    const std::lock_guard lock(mutex_);
    ++questions_;
    if (!failure_.ok()) return failure_;
    return view;
  }

  Status ask(const supervisor::Operator& by, std::string text);

  EventLog events_{8};
  mutable std::mutex mutex_;
  Views views_;                                             // guarded by mutex_
  Status failure_;                                          // guarded by mutex_
  int questions_ = 0;                                       // guarded by mutex_
  std::optional<std::uint32_t> drained_;                    // guarded by mutex_
  std::vector<std::string> asked_;                          // guarded by mutex_
  supervisor::Right allowed_ = supervisor::Right::kChange;  // guarded by mutex_
  supervisor::Operator last_operator_;                      // guarded by mutex_; has_gone is not kept
};

}  // namespace epd::test
