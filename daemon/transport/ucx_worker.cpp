#include "ucx_worker.h"

#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>

namespace epd::transport {

// ---- ucx library

namespace {

constexpr std::uint32_t kLeastMajor = 1;
constexpr std::uint32_t kLeastMinor = 13;

Status unsupported(std::string text) {
  return {StatusCode::kUnsupported, std::move(text)};
}

Status load(const std::string& file, UcxLibrary& ucx) {
  void* library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);  // kept for the life of the process
  if (library == nullptr) return not_found(std::string("no UCX: ") + ::dlerror());
#define EPD_UCX_LOAD(name)                                                  \
  ucx.name = reinterpret_cast<decltype(ucx.name)>(::dlsym(library, #name)); \
  if (ucx.name == nullptr) return unsupported(file + " has no function " #name);
  EPD_UCX_LOAD(ucp_get_version)  // it decides which others there should be
  EPD_UCX_LOAD(ucp_get_version_string)
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  ucx.ucp_get_version(&major, &minor, &release);
  if (major != kLeastMajor || minor < kLeastMinor) {
    return {StatusCode::kVersionMismatch, file + " is UCX " + ucx.ucp_get_version_string() +
                                              "; needed: " + std::to_string(kLeastMajor) + "." +
                                              std::to_string(kLeastMinor) + " or a later 1.x"};
  }
  EPD_UCX_FUNCTIONS(EPD_UCX_LOAD)
#undef EPD_UCX_LOAD
  ucx.major = major;
  ucx.minor = minor;
  ucx.release = release;
  return {};
}

}  // namespace

std::string UcxLibrary::describe(const char* what, ucs_status_t status) const {
  return std::string(what) + ": " + ucs_status_string(status);
}

Result<const UcxLibrary*> ucx_library(const std::string& file) {
  static std::mutex mutex;
  static std::string loaded_file;             // guarded by mutex
  static const UcxLibrary* loaded = nullptr;  // likewise
  const std::lock_guard lock(mutex);
  if (loaded != nullptr) {
    if (file == loaded_file) return loaded;
    return invalid_argument("UCX library is " + file + "; this process has loaded " + loaded_file);
  }
  static UcxLibrary library;
  if (Status status = load(file, library); !status.ok()) return status;
  loaded_file = file;
  loaded = &library;
  return loaded;
}

// ---- listeners

namespace {

namespace fs = std::filesystem;

int option_of(int fd, int name) {
  int value = 0;
  socklen_t size = sizeof(value);
  return ::getsockopt(fd, SOL_SOCKET, name, &value, &size) == 0 ? value : 0;
}

bool listens_by_tcp(int fd) {
  const int domain = option_of(fd, SO_DOMAIN);
  return (domain == AF_INET || domain == AF_INET6) && option_of(fd, SO_ACCEPTCONN) != 0;
}

// UCX has no call that tells the sockets on which it listens.
std::vector<Listener> listeners() {
  std::vector<Listener> found;
  std::error_code error;
  for (fs::directory_iterator entry("/proc/self/fd", error), end; !error && entry != end;
       entry.increment(error)) {
    const int fd = std::atoi(entry->path().filename().c_str());
    struct stat status {};
    if (listens_by_tcp(fd) && ::fstat(fd, &status) == 0) found.push_back({fd, status.st_ino});
  }
  return found;
}

bool is_open(const Listener& listener) {
  struct stat status {};
  return ::fstat(listener.fd, &status) == 0 && status.st_ino == listener.inode;
}

}  // namespace

// ---- ucx worker

namespace {

std::string where(const UcxOptions& options) {
  return "UCX over devices \"" + options.devices + "\", transports \"" + options.transports + "\": ";
}

}  // namespace

std::vector<std::pair<std::string, std::string>> ucx_environment() {
  return {
      // UCX 1.13 would handle SIGSEGV and other signals.
      {"UCX_ERROR_SIGNALS", ""},
      // Errors come as statuses.
      {"UCX_LOG_LEVEL", "fatal"},
      // A batch of 256 KiB and its headers are one segment. UCX allocates memory for each longer message.
      {"UCX_TCP_TX_SEG_SIZE", "264k"},
      {"UCX_TCP_RX_SEG_SIZE", "264k"},
      // Rendezvous uses messages: if a peer dies during a put, UCX 1.13 aborts the process.
      {"UCX_TCP_PUT_ENABLE", "n"},
      // Otherwise a connect would block, minutes if a node is dark, and others would wait for it. One that is
      // refused at once would leave its socket and its endpoint (uct_tcp_ep_create; 1.13).
      {"UCX_TCP_CONN_NB", "y"},
      // Finds nodes that are gone while nothing is under way.
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
  // No zero copy: if a send from the caller's memory fails, UCX 1.13 reports it twice (uct_tcp_ep_progress_tx
  // after the requests have been purged), and aborts the process.
  std::vector<std::pair<const char*, std::string>> settings = {
      {"NET_DEVICES", options.devices}, {"TLS", options.transports}, {"ZCOPY_THRESH", "inf"}};
  // UCX's keepalive asks for the endpoint that was our partner first. If the peer has connected again since,
  // that one is gone, and UCX ends a connection that works. TCP's own keepalive finds hosts that are gone.
  // But nothing else ends a send by rendezvous to a peer that has closed its side.
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
