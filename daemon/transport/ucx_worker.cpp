#include "ucx_worker.h"

#include <algorithm>
#include <cstring>

namespace epd::transport {
namespace {

Status unsupported(std::string text) {
  return {StatusCode::kUnsupported, std::move(text)};
}

std::string where(const UcxOptions& options) {
  return "UCX over devices \"" + options.devices + "\", transports \"" + options.transports + "\": ";
}

}  // namespace

std::vector<std::pair<std::string, std::string>> ucx_environment() {
  return {
      // UCX 1.13 handles SIGSEGV and others otherwise.
      {"UCX_ERROR_SIGNALS", ""},
      // What goes wrong comes as statuses.
      {"UCX_LOG_LEVEL", "fatal"},
      // A batch of 256 KiB and its headers are one segment. UCX puts longer messages together in memory that
      // it
      // allocates for each.
      {"UCX_TCP_TX_SEG_SIZE", "264k"},
      {"UCX_TCP_RX_SEG_SIZE", "264k"},
      // Rendezvous goes by messages: when a peer dies amid a put, UCX 1.13 aborts the process.
      {"UCX_TCP_PUT_ENABLE", "n"},
      // A connect would wait otherwise, minutes if a node is dark, and others would wait behind it. One that
      // is
      // refused at once would leave its socket and its endpoint (uct_tcp_ep_create; 1.13).
      {"UCX_TCP_CONN_NB", "y"},
      // A node that has gone dark, while nothing is under way.
      {"UCX_TCP_KEEPIDLE", "1s"},
      {"UCX_TCP_KEEPINTVL", "1s"},
      {"UCX_TCP_KEEPCNT", "3"},
  };
}

Result<UcxWorker> UcxWorker::open(const UcxOptions& options) {
  if (options.devices.empty()) return invalid_argument("UCX devices are empty; allowed: a list of devices");
  if (options.transports.empty()) {
    return invalid_argument("UCX transports are empty; allowed: a list of transports");
  }
  if (options.rendezvous_bytes == 0)
    return invalid_argument("UCX rendezvous_bytes is 0; allowed: 1 and more");
  Result<const UcxLibrary*> ucx = ucx_library(options.library);
  if (!ucx.ok()) return ucx.status();
  UcxWorker worker(**ucx);
  if (Status status = worker.make_context(options); !status.ok()) return status;
  const std::vector<Listener> others = listeners();
  if (Status status = worker.make_worker(options); !status.ok()) return status;
  for (const Listener& listener : listeners()) {
    if (std::find(others.begin(), others.end(), listener) == others.end())
      worker.listeners_.push_back(listener);
  }
  return worker;
}

Status UcxWorker::make_context(const UcxOptions& options) {
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucx_->ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return unsupported(ucx_->describe("ucp_config_read", status));
  // No zero copy: when a send from the caller's memory fails, UCX 1.13 says so twice (uct_tcp_ep_progress_tx
  // after the requests have been purged), and aborts the process.
  std::vector<std::pair<const char*, std::string>> settings = {
      {"NET_DEVICES", options.devices}, {"TLS", options.transports}, {"ZCOPY_THRESH", "inf"}};
  // UCX's keepalive asks whether the endpoint is there that first was the partner of ours. If the peer has
  // connected anew since, it is not, and UCX ends a connection that works. TCP's own keepalive finds hosts
  // that are gone. But nothing else ends a send by rendezvous to a peer that has closed its side.
  const bool eager = options.rendezvous_bytes == kAlwaysEager;
  settings.emplace_back("KEEPALIVE_INTERVAL", eager ? "inf" : "1s");
  for (const auto& [key, value] : settings) {
    status = ucx_->ucp_config_modify(config, key, value.c_str());
    if (status != UCS_OK) {
      ucx_->ucp_config_release(config);
      return unsupported(where(options) + ucx_->describe("ucp_config_modify", status));
    }
  }
  ucp_params_t params;
  std::memset(&params, 0, sizeof(params));
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  status = ucx_->ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  ucx_->ucp_config_release(config);
  if (status != UCS_OK) return unsupported(where(options) + ucx_->describe("ucp_init_version", status));
  return {};
}

Status UcxWorker::make_worker(const UcxOptions& options) {
  ucp_worker_params_t params;
  std::memset(&params, 0, sizeof(params));
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SINGLE;
  ucs_status_t status = ucx_->ucp_worker_create(context_, &params, &worker_);
  if (status != UCS_OK) return unsupported(where(options) + ucx_->describe("ucp_worker_create", status));
  status = ucx_->ucp_worker_get_efd(worker_, &event_fd_);
  if (status != UCS_OK) return unsupported(where(options) + ucx_->describe("ucp_worker_get_efd", status));
  return {};
}

Result<Address> UcxWorker::address() const {
  ucp_address_t* raw = nullptr;
  std::size_t bytes = 0;
  const ucs_status_t status = ucx_->ucp_worker_get_address(worker_, &raw, &bytes);
  if (status != UCS_OK) return unsupported(ucx_->describe("ucp_worker_get_address", status));
  Address address(bytes);
  std::memcpy(address.data(), raw, bytes);
  ucx_->ucp_worker_release_address(worker_, raw);
  return address;
}

bool UcxWorker::deaf() const {
  return !std::all_of(listeners_.begin(), listeners_.end(), is_open);
}

UcxWorker::~UcxWorker() {
  if (worker_ != nullptr) ucx_->ucp_worker_destroy(worker_);
  if (context_ != nullptr) ucx_->ucp_cleanup(context_);
}

}  // namespace epd::transport
