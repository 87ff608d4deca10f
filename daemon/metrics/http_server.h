// A small HTTP server for public pages. It answers GET, one request for each connection. One thread serves
// all connections, and the limits below bound what a peer can make it hold.
#pragma once

#include "common/fd.h"
#include "common/status.h"

#include <poll.h>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace epd::metrics {

struct HttpAnswer {
  int status = 200;
  std::string body;
};

class HttpServer {
 public:
  static constexpr std::size_t kMaxConnections = 64;  // for one more, the oldest makes room
  static constexpr std::size_t kMaxHeadBytes = 8 << 10;
  static constexpr std::size_t kMaxAnswers = 8;  // of different content, held for peers that read slowly

  struct Page {
    std::string path;                  // "/metrics"
    std::function<HttpAnswer()> make;  // on the server's thread; at most ten times a second
  };
  // RESOURCE_EXHAUSTED if there is no room for a thread.
  static Result<std::unique_ptr<HttpServer>> start(UniqueFd listener, std::vector<Page> pages);
  ~HttpServer();  // ends all connections
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

 private:
  using Text = std::shared_ptr<const std::string>;  // a whole answer
  struct Served {
    Page page;
    Text text;
    std::uint64_t until_ns = 0;  // how long `text` is recent enough
  };
  struct Connection {
    UniqueFd fd;
    std::uint64_t due_ns = 0;  // ends then, whatever it does
    std::string head;          // until it has been answered
    Text answer;
    std::size_t sent = 0;
    bool ended = false;
  };

  HttpServer(UniqueFd listener, UniqueFd wake, std::vector<Page> pages);
  void run();
  std::vector<pollfd> entries() const;
  int wait_ms() const;
  void take_in();
  void make_room();
  void read(Connection& connection);
  void write(Connection& connection);
  Text answer_to(std::string_view head);
  Text text_of(Served& served);
  void hold(Text text);

  const UniqueFd listener_;
  const UniqueFd wake_;
  std::thread thread_;
  // Only the thread uses these.
  std::vector<Served> pages_;
  std::list<Connection> connections_;  // the oldest first
  std::deque<Text> held_;              // the oldest first
};

}  // namespace epd::metrics
