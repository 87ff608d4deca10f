#include "http_server.h"

#include "base/clock.h"

#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace epd::metrics {
namespace {

constexpr std::uint64_t kMs = 1'000'000;
constexpr std::uint64_t kRequestNs = 5'000 * kMs;  // for the whole request
constexpr std::uint64_t kAnswerNs = 10'000 * kMs;  // for reading the answer
constexpr std::uint64_t kRecentNs = 100 * kMs;
constexpr std::size_t kTakenInAtOnce = 32;
constexpr int kPauseMs = 100;
constexpr int kReceiveBytes = 16 << 10;  // what the kernel keeps for a connection, each way
constexpr int kSendBytes = 128 << 10;

std::uint64_t now_ns() {
  return MonotonicClock().now_ns();
}

const char* reason_of(int status) {
  switch (status) {
    case 200: return "OK";
    case 400: return "Bad Request";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 431: return "Request Header Fields Too Large";
    default: return "Service Unavailable";
  }
}

std::shared_ptr<const std::string> text_of_answer(const HttpAnswer& answer) {
  return std::make_shared<const std::string>("HTTP/1.1 " + std::to_string(answer.status) + " " +
                                             reason_of(answer.status) +
                                             "\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8"
                                             "\r\nConnection: close\r\nContent-Length: " +
                                             std::to_string(answer.body.size()) + "\r\n\r\n" + answer.body);
}

// Replaces an answer that has been written.
const std::shared_ptr<const std::string>& nothing() {
  static const auto empty = std::make_shared<const std::string>();
  return empty;
}

}  // namespace

Result<std::unique_ptr<HttpServer>> HttpServer::start(UniqueFd listener, std::vector<Page> pages) {
  Result<UniqueFd> wake = make_eventfd();
  if (!wake.ok()) return wake.status();
  // Connections inherit these from their listener.
  ::setsockopt(listener.get(), SOL_SOCKET, SO_RCVBUF, &kReceiveBytes, sizeof(kReceiveBytes));
  ::setsockopt(listener.get(), SOL_SOCKET, SO_SNDBUF, &kSendBytes, sizeof(kSendBytes));
  std::unique_ptr<HttpServer> server(new HttpServer(std::move(listener), std::move(*wake), std::move(pages)));
  try {
    server->thread_ = std::thread([self = server.get()] { self->run(); });
  } catch (const std::system_error& error) {
    return resource_exhausted(std::string("no thread for the HTTP server: ") + error.what());
  }
  return server;
}

HttpServer::HttpServer(UniqueFd listener, UniqueFd wake, std::vector<Page> pages)
    : listener_(std::move(listener)), wake_(std::move(wake)) {
  for (Page& page : pages) pages_.push_back({std::move(page), nullptr, 0});
}

HttpServer::~HttpServer() {
  if (!thread_.joinable()) return;
  ring_eventfd(wake_.get());
  thread_.join();
}

void HttpServer::run() {
  ::prctl(PR_SET_NAME, "epd-http");
  for (;;) {
    std::vector<pollfd> found = entries();
    if (::poll(found.data(), found.size(), wait_ms()) < 0 && errno != EINTR) return;
    if (found[0].revents != 0) return;
    // Peers that have sent something are answered first: newcomers may need their places.
    auto entry = found.begin() + 2;
    for (Connection& connection : connections_) {
      const short events = (entry++)->revents;
      if (events != 0 && !connection.ended) connection.answer ? write(connection) : read(connection);
    }
    const std::uint64_t now = now_ns();
    std::erase_if(connections_,
                  [&](const Connection& connection) { return connection.ended || connection.due_ns <= now; });
    if (found[1].revents != 0) take_in();
  }
}

std::vector<pollfd> HttpServer::entries() const {
  std::vector<pollfd> all = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
  for (const Connection& connection : connections_) {
    const bool writes = connection.answer && connection.sent < connection.answer->size();
    all.push_back({connection.fd.get(), static_cast<short>(writes ? POLLOUT : POLLIN), 0});
  }
  return all;
}

int HttpServer::wait_ms() const {
  if (connections_.empty()) return -1;
  const std::uint64_t due =
      std::min_element(connections_.begin(), connections_.end(), [](const auto& a, const auto& b) {
        return a.due_ns < b.due_ns;
      })->due_ns;
  const std::uint64_t now = now_ns();
  return due <= now ? 0 : static_cast<int>((due - now) / kMs + 1);
}

void HttpServer::take_in() {
  for (std::size_t i = 0; i < kTakenInAtOnce; ++i) {
    UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) {
      // Out of descriptors: the connection waits in the kernel, and is not asked for again at once.
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) ::usleep(kPauseMs * 1000);
      return;
    }
    if (connections_.size() >= kMaxConnections) make_room();
    connections_.emplace_back();
    connections_.back().fd = std::move(fd);
    connections_.back().due_ns = now_ns() + kRequestNs;
  }
}

// Ends a connection that has not sent its request, if there is one.
void HttpServer::make_room() {
  const auto silent = std::find_if(connections_.begin(), connections_.end(),
                                   [](const Connection& connection) { return !connection.answer; });
  connections_.erase(silent != connections_.end() ? silent : connections_.begin());
}

void HttpServer::read(Connection& connection) {
  char bytes[2048];
  const ssize_t n = ::recv(connection.fd.get(), bytes, sizeof(bytes), 0);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) {
    connection.ended = true;
    return;
  }
  connection.head.append(bytes, static_cast<std::size_t>(n));
  const std::size_t end = connection.head.find("\r\n\r\n");
  if (end == std::string::npos && connection.head.size() <= kMaxHeadBytes) return;
  connection.answer =
      end != std::string::npos
          ? answer_to(std::string_view(connection.head).substr(0, end))
          : text_of_answer({431, "the request has more than " + std::to_string(kMaxHeadBytes) + " bytes\n"});
  connection.head = std::string();
  connection.due_ns = now_ns() + kAnswerNs;
  write(connection);
}

// After the last byte it waits until the peer has read it: closing a socket with unread bytes would take the
// answer back.
void HttpServer::write(Connection& connection) {
  while (connection.sent < connection.answer->size()) {
    const std::string& text = *connection.answer;
    const ssize_t n = ::send(connection.fd.get(), text.data() + connection.sent,
                             text.size() - connection.sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      connection.ended = errno != EAGAIN;
      return;
    }
    connection.sent += static_cast<std::size_t>(n);
    if (connection.sent < text.size()) continue;
    ::shutdown(connection.fd.get(), SHUT_WR);
    connection.answer = nothing();
  }
  char bytes[2048];
  const ssize_t n = ::recv(connection.fd.get(), bytes, sizeof(bytes), 0);
  connection.ended = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

HttpServer::Text HttpServer::answer_to(std::string_view head) {
  const std::string_view line = head.substr(0, head.find("\r\n"));
  const std::size_t method = line.find(' ');
  const std::size_t target = line.rfind(' ');
  if (method == std::string_view::npos || method == target || !line.substr(target + 1).starts_with("HTTP/1."))
    return text_of_answer({400, "this is no request of HTTP/1.1\n"});
  if (line.substr(0, method) != "GET")
    return text_of_answer({405, "the method is not allowed; allowed: GET\n"});
  std::string_view path = line.substr(method + 1, target - method - 1);
  path = path.substr(0, path.find('?'));
  std::string paths;
  for (Served& served : pages_) {
    if (served.page.path == path) return text_of(served);
    paths += " " + served.page.path;
  }
  return text_of_answer({404, "there is no such page; there are" + paths + "\n"});
}

HttpServer::Text HttpServer::text_of(Served& served) {
  if (served.text == nullptr || now_ns() >= served.until_ns) {
    served.text = text_of_answer(served.page.make());
    served.until_ns = now_ns() + kRecentNs;
    hold(served.text);
  }
  return served.text;
}

// Drops texts that nobody reads any more. If too many remain, connections that still read the oldest one are
// ended.
void HttpServer::hold(Text text) {
  std::erase_if(held_, [](const Text& one) { return one.use_count() == 1; });
  if (held_.size() >= kMaxAnswers) {
    for (Connection& connection : connections_) connection.ended |= connection.answer == held_.front();
    held_.pop_front();
  }
  held_.push_back(std::move(text));
}

}  // namespace epd::metrics
