#include "base/airlock.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <pthread.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>

// What the child runs, it runs in this process's memory while the thread that started it waits.
#define EPD_IN_CHILD __attribute__((no_sanitize("address", "thread", "undefined"), noinline))

#ifdef __SANITIZE_THREAD__
// ThreadSanitizer takes what it sees of clone() for a fork of the whole process, and this name it does not
// see.
extern "C" int __clone(int (*function)(void*), void* stack, int flags, void* argument, ...);
#define EPD_CLONE __clone
#else
#define EPD_CLONE ::clone
#endif

namespace epd {
namespace {

constexpr std::size_t kMaxReceived = 253;  // the kernel's SCM_MAX_FD
constexpr std::size_t kChildStackBytes = 64 << 10;
constexpr std::size_t kCloserStackBytes = 256 << 10;
constexpr unsigned kNvidiaMajor = 195;  // of /dev/nvidiactl, to which CUDA's exported handles belong

}  // namespace

struct AirlockJob {
  // For the child.
  int keep[2];
  int top = 0;
  int socket = -1;
  int pass = -1;
  std::size_t wanted = 0;
  // From the child.
  long received = -1;
  int error = 0;
  std::size_t num_fds = 0;
  int refused = -1;  // index of the first that can't be memory
  bool passed = false;
  // Its own.
  char byte = 0;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxReceived * sizeof(int))];
  alignas(16) char stack[kChildStackBytes];
};

namespace {

EPD_IN_CHILD bool may_be_memory(int fd) {
  if (::syscall(SYS_fcntl, fd, F_GET_SEALS) >= 0) return true;
  struct statx info;
  // Without asking whoever serves the file: that could take for ever.
  if (::syscall(SYS_statx, fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &info) != 0) return false;
  const unsigned type = info.stx_mode & S_IFMT;
  return type == 0 || (type == S_IFCHR && info.stx_rdev_major == kNvidiaMajor);
}

// Gives this task a descriptor table of its own. What lies above `top` is not even copied. False: it still
// shares the daemon's table, and must close nothing.
EPD_IN_CHILD bool leave_table(int top) {
  return ::syscall(SYS_close_range, top + 1, ~0u, CLOSE_RANGE_UNSHARE) == 0;
}

// In a table of one's own: closes all but `keep`, ascending.
EPD_IN_CHILD void keep_only(const int* keep, std::size_t count, int top) {
  int next = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (keep[i] > next) ::syscall(SYS_close_range, next, keep[i] - 1, 0);
    next = keep[i] + 1;
  }
  if (next <= top) ::syscall(SYS_close_range, next, top, 0);
}

EPD_IN_CHILD void receive_and_pass(AirlockJob& job) {
  iovec part{&job.byte, 1};
  msghdr message;
  message.msg_name = nullptr;
  message.msg_namelen = 0;
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = job.control;
  message.msg_controllen = sizeof(job.control);
  message.msg_flags = 0;
  job.received = ::syscall(SYS_recvmsg, job.socket, &message, MSG_DONTWAIT);
  if (job.received < 0) {
    job.error = errno;
    return;
  }
  auto* header = reinterpret_cast<cmsghdr*>(job.control);
  if (message.msg_controllen < sizeof(cmsghdr) || header->cmsg_level != SOL_SOCKET ||
      header->cmsg_type != SCM_RIGHTS)
    return;
  job.num_fds = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
  const int* fds = reinterpret_cast<const int*>(CMSG_DATA(header));
  for (std::size_t i = 0; i < job.num_fds && job.refused < 0; ++i) {
    if (!may_be_memory(fds[i])) job.refused = static_cast<int>(i);
  }
  if (job.refused >= 0 || job.num_fds != job.wanted) return;
  message.msg_controllen = CMSG_SPACE(job.num_fds * sizeof(int));
  job.passed = ::syscall(SYS_sendmsg, job.pass, &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0;
  if (!job.passed) job.error = errno;
}

EPD_IN_CHILD int child_main(void* argument) {
  AirlockJob& job = *static_cast<AirlockJob*>(argument);
  if (leave_table(job.top)) {
    keep_only(job.keep, 2, job.top);
    receive_and_pass(job);
  } else {
    job.error = errno;
  }
  ::syscall(SYS_exit_group, 0);
  return 0;
}

Status exhausted(const std::string& what) {
  return {StatusCode::kResourceExhausted, what};
}

}  // namespace

Result<std::unique_ptr<Airlock>> Airlock::create() {
  std::unique_ptr<Airlock> made(new Airlock);
  Result<std::pair<UniqueFd, UniqueFd>> pass = make_socketpair();
  if (!pass.ok()) return pass.status();
  made->own_end_ = std::move(pass->first);
  made->child_end_ = std::move(pass->second);
  Result<UniqueFd> placeholder = make_eventfd();
  if (!placeholder.ok()) return placeholder.status();
  made->placeholder_ = std::move(*placeholder);
  made->top_ = made->child_end_.get();
  const auto reserve = [&](UniqueFd& slot) -> Status {
    Result<UniqueFd> copy = duplicate(made->placeholder_.get());
    if (!copy.ok()) return copy.status();
    slot = std::move(*copy);
    made->top_ = std::max(made->top_, slot.get());
    return {};
  };
  if (Status status = reserve(made->receiving_slot_); !status.ok()) return status;
  for (UniqueFd& slot : made->slots_) {
    if (Status status = reserve(slot); !status.ok()) return status;
  }
  made->job_ = std::make_unique<AirlockJob>();
  return Result<std::unique_ptr<Airlock>>(std::move(made));
}

Airlock::~Airlock() {
  for (UniqueFd& fd : doomed_) (void)fd.release();
  if (closer_ == nullptr) return;
  closer_->state.store(Closer::kMayEnd);
  closer_->state.notify_one();
}

void Airlock::clear_slots() {
  for (const UniqueFd& slot : slots_) ::dup3(placeholder_.get(), slot.get(), O_CLOEXEC);
}

// Waits until the child has let go of our memory, which is before the kernel closes its descriptors.
Result<pid_t> Airlock::start_child() {
  job_->top = top_;
  char* top_of_stack = job_->stack + sizeof(job_->stack);
  const int pid = EPD_CLONE(child_main, top_of_stack, CLONE_VM | CLONE_VFORK | CLONE_FILES, job_.get());
  if (pid < 0) return errno_status("clone");
  return static_cast<pid_t>(pid);
}

void Airlock::reap() {
  std::erase_if(children_, [](const Child& child) {
    const pid_t ended = ::waitpid(child.pid, nullptr, WNOHANG | __WALL);
    return ended == child.pid || (ended < 0 && errno == ECHILD);
  });
}

Status Airlock::check_held_up(std::uint32_t uid) const {
  std::size_t all = 0;
  std::size_t of_user = 0;
  for (const Child& child : children_) {
    ++all;
    of_user += child.uid == uid ? 1 : 0;
  }
  if (of_user >= kMaxHeldUpPerUser) {
    return exhausted("descriptors of user " + std::to_string(uid) + " in " + std::to_string(of_user) +
                     " messages are still being closed; allowed: " + std::to_string(kMaxHeldUpPerUser));
  }
  if (all < kMaxHeldUp) return {};
  return exhausted("descriptors in " + std::to_string(all) +
                   " messages are still being closed; allowed: " + std::to_string(kMaxHeldUp));
}

Airlock::Received Airlock::receive(int socket, std::uint32_t uid, Packet& packet) {
  packet.fds.clear();
  reap();
  if (Status status = check_held_up(uid); !status.ok()) return {status, {}};
  AirlockJob& job = *job_;
  if (::dup3(socket, receiving_slot_.get(), O_CLOEXEC) < 0) return {errno_status("dup3"), {}};
  job.socket = receiving_slot_.get();
  job.pass = child_end_.get();
  job.wanted = packet.header.num_fds;
  job.keep[0] = std::min(job.socket, job.pass);
  job.keep[1] = std::max(job.socket, job.pass);
  job.received = -1;
  job.error = 0;
  job.num_fds = 0;
  job.refused = -1;
  job.passed = false;
  Result<pid_t> child = start_child();
  ::dup3(placeholder_.get(), receiving_slot_.get(), O_CLOEXEC);
  if (!child.ok()) return {exhausted(child.status().message()), {}};
  children_.push_back({*child, uid});
  if (job.passed) return {take_passed(job.num_fds, packet), {}};
  if (job.received < 0 || job.error != 0) {
    errno = job.error;
    return {errno_status("a message with descriptors"), {}};
  }
  if (job.num_fds != job.wanted) {
    return {invalid_argument("message says " + std::to_string(job.wanted) + " descriptors; received " +
                             std::to_string(job.num_fds)),
            {}};
  }
  return {invalid_argument("descriptor " + std::to_string(job.refused) +
                           " is no memory; allowed: a memfd, or what cuMemExportToShareableHandle gives"),
          static_cast<std::uint32_t>(job.refused)};
}

Status Airlock::take_passed(std::size_t count, Packet& packet) {
  char byte;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(abi::kMaxMessageFds * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (::recvmsg(own_end_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) < 0)
    return errno_status("a message with descriptors");
  append_descriptors(message, packet.fds);
  if (packet.fds.size() == count) return {};
  for (UniqueFd& fd : packet.fds) close(std::move(fd));
  packet.fds.clear();
  return exhausted("the daemon has no room for " + std::to_string(count) +
                   " more descriptors (RLIMIT_NOFILE)");
}

void Airlock::read_out(int socket) {
  constexpr int kMostPackets = 256;
  for (int i = 0; i < kMostPackets; ++i) {
    char byte;
    iovec part{&byte, 1};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (::recvmsg(socket, &message, MSG_DONTWAIT | MSG_PEEK) <= 0) return;
    if ((message.msg_flags & MSG_CTRUNC) != 0) return;  // it carries descriptors
    ::recv(socket, &byte, 1, MSG_DONTWAIT);
  }
}

void Airlock::close_socket(UniqueFd socket) {
  if (!socket.valid()) return;
  ::shutdown(socket.get(), SHUT_RDWR);
  close(std::move(socket));
}

void Airlock::close(UniqueFd descriptor) {
  if (descriptor.valid()) doomed_.push_back(std::move(descriptor));
}

void* Airlock::run_closer(void* argument) {
  const std::unique_ptr<std::shared_ptr<Closer>> shared(static_cast<std::shared_ptr<Closer>*>(argument));
  Closer& closer = **shared;
  const bool left = leave_table(closer.top);
  closer.state.store(left ? Closer::kHasCopies : Closer::kFailed);
  if (left) closer.state.wait(Closer::kHasCopies);
  return nullptr;  // and with this thread its descriptors go
}

bool Airlock::start_closer() {
  auto closer = std::make_shared<Closer>();
  closer->top = top_;
  const std::size_t count = std::min(doomed_.size(), kSlots);
  for (std::size_t i = 0; i < count; ++i) {
    if (::dup3(doomed_[i].get(), slots_[i].get(), O_CLOEXEC) < 0) return false;
  }
  pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  ::pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  ::pthread_attr_setstacksize(&attributes, kCloserStackBytes);
  auto shared = std::make_unique<std::shared_ptr<Closer>>(closer);
  pthread_t thread;
  const bool started = ::pthread_create(&thread, &attributes, run_closer, shared.get()) == 0;
  ::pthread_attr_destroy(&attributes);
  if (!started) return false;
  (void)shared.release();
  closer_ = std::move(closer);
  closing_ = count;
  return true;
}

void Airlock::flush() {
  reap();
  if (closer_ != nullptr) {
    const std::uint32_t state = closer_->state.load();
    if (state == Closer::kStarting) return;
    // Ours are not the last: the thread has copies.
    if (state == Closer::kHasCopies)
      doomed_.erase(doomed_.begin(), doomed_.begin() + static_cast<std::ptrdiff_t>(closing_));
    clear_slots();
    closer_->state.store(Closer::kMayEnd);
    closer_->state.notify_one();
    closer_.reset();
    held_up_ = state == Closer::kFailed;
    if (held_up_) return;
  }
  // If there is no room for a thread now, the next flush tries again.
  held_up_ = !doomed_.empty() && !start_closer();
  if (held_up_) clear_slots();
}

int Airlock::next_look_ms() const {
  if (closer_ != nullptr) return 1;
  if (!doomed_.empty()) return 100;
  return children_.empty() ? -1 : 1000;
}

}  // namespace epd
