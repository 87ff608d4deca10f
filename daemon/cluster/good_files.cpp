#include "good_files.h"

#include "base/event.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <system_error>

namespace epd::cluster {
namespace {

constexpr std::chrono::seconds kLookEach(1);
constexpr std::int64_t kDaySeconds = 86'400;
constexpr std::int64_t kSoonSeconds = 30 * kDaySeconds;

std::int64_t days_until(std::int64_t unix_s) {
  return (unix_s - std::time(nullptr)) / kDaySeconds;
}

// gRPC reads the identity twice, as key and as certificate. It notices a new version in between by the time
// of its last change, in seconds; so each version has its own second.
Result<UniqueFd> memory_with(const std::string& text, std::int64_t version) {
  UniqueFd fd(::memfd_create("epd-certificates", MFD_CLOEXEC));
  if (!fd.valid()) return errno_status("memfd_create");
  for (std::size_t size = 0; size < text.size();) {
    const ssize_t n = ::write(fd.get(), text.data() + size, text.size() - size);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return errno_status("write to a memfd");
    size += static_cast<std::size_t>(n);
  }
  if (::fchmod(fd.get(), S_IRUSR) != 0) return errno_status("fchmod of a memfd");
  const timespec times[2] = {{version, 0}, {version, 0}};
  if (::futimens(fd.get(), times) != 0) return errno_status("futimens of a memfd");
  return fd;
}

}  // namespace

Result<std::unique_ptr<GoodFiles>> GoodFiles::open(const Settings& settings) {
  std::unique_ptr<GoodFiles> files(new GoodFiles(settings));
  if (Status status = files->take_up(); !status.ok()) return status;
  files->tell_expiry();
  return files;
}

Status GoodFiles::begin() {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return resource_exhausted(std::string("no thread for the certificate files: ") + error.what());
  }
  return {};
}

GoodFiles::~GoodFiles() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void GoodFiles::run() {
  ::prctl(PR_SET_NAME, "epd-certs");
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, kLookEach, [this] { return stopping_; })) {
    lock.unlock();
    look();
    lock.lock();
  }
}

void GoodFiles::look() {
  const std::string problem = take_up().message();
  tell_expiry();
  if (problem == problem_) return;
  if (problem.empty()) {
    record_event(EventKind::kOther, LogLevel::kInfo, "certificate files are valid again", {});
  } else {
    record_event(EventKind::kOther, LogLevel::kWarning, "invalid certificate files",
                 {{"reason", problem}, {"effect", "the last valid files stay in use"}});
  }
  problem_ = problem;
}

Status GoodFiles::take_up() {
  CertificateFacts facts;
  CertificateTexts texts;
  if (Status status = check_certificates(settings_, &facts, &texts); !status.ok()) return status;
  const bool first = identity_ < 0;
  const bool other_authorities = texts.authorities != held_.authorities;
  const bool other_identity = texts.identity != held_.identity;
  if (Status status = replace(authorities_, held_.authorities, texts.authorities); !status.ok())
    return status;
  if (Status status = replace(identity_, held_.identity, texts.identity); !status.ok()) return status;
  expires_unix_s_ = facts.expires_unix_s;
  if (first) return {};
  if (other_authorities)
    record_event(EventKind::kOther, LogLevel::kInfo, "certificate authorities renewed",
                 {{"file", settings_.tls_ca}});
  if (other_identity)
    record_event(EventKind::kOther, LogLevel::kInfo, "certificate renewed",
                 {{"file", settings_.tls_cert}, {"expires_in_days", days_until(facts.expires_unix_s)}});
  return {};
}

void GoodFiles::tell_expiry() {
  const std::int64_t expiry = expires_unix_s_;
  if (expiry == told_expiry_ || expiry - std::time(nullptr) >= kSoonSeconds) return;
  told_expiry_ = expiry;
  record_event(EventKind::kOther, LogLevel::kWarning, "certificate expires soon",
               {{"file", settings_.tls_cert}, {"days", days_until(expiry)}});
}

// The descriptor keeps its number, which is part of the path.
Status GoodFiles::replace(int& fd, std::string& held, const std::string& text) {
  if (fd >= 0 && text == held) return {};
  Result<UniqueFd> memory = memory_with(text, ++version_);
  if (!memory.ok()) return memory.status();
  if (fd < 0) {
    fd = memory->release();
  } else if (::dup3(memory->get(), fd, O_CLOEXEC) < 0) {
    return errno_status("dup3 of a memfd");
  }
  held = text;
  return {};
}

}  // namespace epd::cluster
