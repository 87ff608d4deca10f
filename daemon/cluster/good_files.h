// The certificate files that gRPC reads: copies of the last valid ones. gRPC itself would end the daemon for
// an empty file, which `cp` and a full disk leave.
#pragma once

#include "cluster/settings.h"
#include "common/fd.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace epd::cluster {

class GoodFiles {
 public:
  // Reads the files once. INVALID_ARGUMENT: they are invalid.
  static Result<std::unique_ptr<GoodFiles>> open(const Settings& settings);
  // Starts a thread that reads the files each second: a disk may be slow. Once.
  Status begin();
  ~GoodFiles();
  GoodFiles(const GoodFiles&) = delete;
  GoodFiles& operator=(const GoodFiles&) = delete;

  // Takes the files if they are valid together; otherwise the last valid ones stay. The log says which, and
  // once for each certificate that it expires soon. Called before begin(), or by its thread.
  void look();

  // Paths of the last valid files. Opening one reads all of one version.
  std::string authorities() const { return path_of(authorities_); }
  std::string identity() const { return path_of(identity_); }  // the key, then the chain of its certificate
  std::int64_t expires_unix_s() const { return expires_unix_s_; }  // of that certificate; from any thread

 private:
  explicit GoodFiles(const Settings& settings) : settings_(settings) {}
  static std::string path_of(int fd) { return "/proc/self/fd/" + std::to_string(fd); }
  Status take_up();
  void tell_expiry();
  Status replace(int& fd, std::string& held, const std::string& text);
  void run();

  const Settings settings_;
  CertificateTexts held_;
  // Memory in place of files; -1: none yet. Never closed: gRPC may read them as long as the process lives,
  // and must not find another file there.
  int authorities_ = -1;
  int identity_ = -1;
  std::int64_t version_ = 0;
  std::string problem_;  // of the last look; empty: none
  std::atomic<std::int64_t> expires_unix_s_ = 0;
  std::int64_t told_expiry_ = 0;  // of the certificate whose expiry was logged

  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;  // guarded by mutex_
};

}  // namespace epd::cluster
