#include <algorithm>
#include <epd/epd.hpp>
#include <iostream>

int main() try {
  epd::Session session;  // attaches to $EPD_SOCKET, any device
  epd::Config config;
  config.name = "minimal";
  config.num_ranks = 1, config.num_experts = 4, config.max_tokens = 8, config.hidden = 128, config.topk = 1;
  epd::Group group = session.join(config);  // returns when all ranks are there

  epd::Buffers b = group.buffers(0);  // shared with the engine: nothing is copied
  const auto x = b.x.as<std::uint16_t>(), recv_x = b.recv_x.as<std::uint16_t>();  // bf16: 0x3f80 is 1.0
  const auto topk_idx = b.topk_idx.as<std::int32_t>();
  std::fill(x.begin(), x.end(), 0x3f80);  // 8 tokens of ones, and their experts
  for (int t = 0; t < 8; ++t) topk_idx[t] = t % 4, b.topk_weights[t] = 1.0f;

  epd::Dispatch dispatch = group.dispatch(0, 8, EPD_NO_STREAM);    // slot 0, 8 tokens, no CUDA stream
  const auto rows = dispatch.ticket.wait().num_recv_rows;          // now recv_x holds the rows
  std::copy_n(recv_x.begin(), rows * config.hidden, b.y.begin());  // an expert that changes nothing
  group.combine(0, dispatch.handle, EPD_NO_STREAM).wait();         // now b.out holds the sums
  std::cout << "received " << rows << " rows\n";
  return rows == 8 && b.out[0] == 0x3f80 ? 0 : 1;
} catch (const epd::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
