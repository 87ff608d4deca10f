#include <epd/epd.hpp>

#include <cstdio>

int main() {
  epd::AttachOptions options;
  options.socket_path = "/nonexistent/epd.sock";
  try {
    const epd::Session session(options);
  } catch (const epd::Error& error) {
    std::printf("%s\n", epd_version());
    return error.status() == EPD_DAEMON_LOST ? 0 : 1;
  }
  return 1;
}
