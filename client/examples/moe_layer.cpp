// One Mixture-of-Experts layer with epd's C++ wrapper, two micro-batches at a time: while the experts work
// on one, the rows of the other travel. See moe_layer.c for the same in plain steps.
//
//   moe_layer_cpp [--ranks R] [SOCKET]
//
// Starts R processes (default 2) that form one group on a running daemon; exit code 0 when every rank
// found what it should. Needs C++17.
#include <epd/epd.hpp>

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr std::uint32_t kTokens = 32;
constexpr std::uint32_t kHidden = 256;
constexpr std::uint32_t kTopk = 2;
constexpr std::uint32_t kExpertsPerRank = 4;
constexpr int kSteps = 3;
constexpr std::int32_t kTimeoutMs = 30'000;
constexpr std::uint32_t kBatches = 2;  // one buffer slot for each micro-batch

// bf16 is the upper half of a float32; the small integers used here fit it exactly.
std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<std::uint16_t>(bits >> 16);
}

float from_bf16(std::uint16_t half) {
  const std::uint32_t bits = std::uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float token_value(std::uint32_t rank, std::uint32_t batch, std::uint32_t token) {
  return static_cast<float>(rank % 8 * 5 + batch * 20 + token % 7);
}

// The router: fills the inputs of a slot. Odd ranks leave out every fourth token's second expert.
void route(const epd::Group& group, std::uint32_t slot) {
  const epd::Buffers b = group.buffers(slot);
  const auto x = b.x.as<std::uint16_t>();
  const auto topk_idx = b.topk_idx.as<std::int32_t>();
  const std::uint32_t num_experts = group.config().num_experts;
  for (std::uint32_t t = 0; t < kTokens; ++t) {
    const std::uint16_t value = to_bf16(token_value(group.rank(), slot, t));
    for (std::uint32_t h = 0; h < kHidden; ++h) x[t * kHidden + h] = value;
    for (std::uint32_t k = 0; k < kTopk; ++k) {
      const bool left_out = k == 1 && t % 4 == 0 && group.rank() % 2 == 1;
      const std::uint32_t expert = (t + group.rank() + k * kExpertsPerRank) % num_experts;
      topk_idx[t * kTopk + k] = left_out ? -1 : static_cast<std::int32_t>(expert);
      b.topk_weights[t * kTopk + k] = k == 0 ? 1.0f : 0.5f;
    }
  }
}

// The experts return the row as it is; combine weighs it.
void run_experts(const epd::Group& group, std::uint32_t slot, std::uint32_t num_rows) {
  const epd::Buffers b = group.buffers(slot);
  std::memcpy(b.y.data(), b.recv_x.data(), std::size_t{num_rows} * kHidden * sizeof(std::uint16_t));
}

bool check(const epd::Group& group, std::uint32_t slot) {
  const epd::Buffers b = group.buffers(slot);
  for (std::uint32_t t = 0; t < kTokens; ++t) {
    const bool left_out = t % 4 == 0 && group.rank() % 2 == 1;
    const float expected = token_value(group.rank(), slot, t) * (left_out ? 1.0f : 1.5f);
    for (std::uint32_t h = 0; h < kHidden; ++h) {
      const float got = from_bf16(b.out[t * kHidden + h]);
      if (got == expected) continue;
      std::fprintf(stderr, "rank %u: batch %u token %u column %u is %g, expected %g\n", group.rank(), slot, t,
                   h, static_cast<double>(got), static_cast<double>(expected));
      return false;
    }
  }
  return true;
}

bool run_layer(epd::Group& group) {
  std::array<epd::Dispatch, kBatches> dispatched;
  std::array<epd::Ticket, kBatches> combined;
  for (std::uint32_t slot = 0; slot < kBatches; ++slot) {
    route(group, slot);
    dispatched[slot] = group.dispatch(slot, kTokens, EPD_NO_STREAM);
  }
  for (std::uint32_t slot = 0; slot < kBatches; ++slot) {
    const epd_result_t arrived = dispatched[slot].ticket.wait(kTimeoutMs);
    run_experts(group, slot, arrived.num_recv_rows);
    epd::CombineOptions options;
    options.weighted = true;
    combined[slot] = group.combine(slot, dispatched[slot].handle, EPD_NO_STREAM, options);
  }
  bool right = true;
  for (std::uint32_t slot = 0; slot < kBatches; ++slot) {
    combined[slot].wait(kTimeoutMs);
    right = check(group, slot) && right;
  }
  return right;
}

int run_rank(std::uint32_t rank, std::uint32_t num_ranks, const std::string& name,
             const std::string& socket) {
  try {
    epd::AttachOptions options;
    options.socket_path = socket;
    epd::Session session(options);
    epd::Config config;
    config.name = name;
    config.rank = static_cast<std::int32_t>(rank);
    config.num_ranks = num_ranks;
    config.num_experts = num_ranks * kExpertsPerRank;
    config.max_tokens = kTokens;
    config.hidden = kHidden;
    config.topk = kTopk;
    config.depth = kBatches;
    config.timeout_ms = kTimeoutMs;
    epd::Group group = session.join(config);
    // A hook instead of a wait: it runs on a thread of the library.
    std::atomic<int> outcome{-1};
    group.noop(0, EPD_NO_STREAM).on_complete([&outcome](const epd_result_t& result) {
      outcome = result.status;
    });
    for (int i = 0; i < kTimeoutMs && outcome < 0; ++i) ::usleep(1000);
    if (outcome != EPD_OK) return 1;
    for (int step = 0; step < kSteps; ++step) {
      if (!run_layer(group)) return 1;
    }
    std::printf("rank %u on %s: %d layers right\n", rank, session.info().device, kSteps);
    return 0;
  } catch (const epd::Error& error) {
    std::fprintf(stderr, "rank %u: %s\n", rank, error.what());
    return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  long num_ranks = 2;
  std::string socket;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--ranks" && i + 1 < argc) {
      num_ranks = std::strtol(argv[++i], nullptr, 10);
    } else {
      socket = argument;
    }
  }
  if (num_ranks < 2 || num_ranks > 64 || (!socket.empty() && socket[0] == '-')) {
    std::fprintf(stderr, "usage: %s [--ranks 2 .. 64] [SOCKET]\n", argv[0]);
    return 2;
  }
  const std::string name = "moe-layer-cpp-" + std::to_string(::getpid());
  bool right = true;
  long started = 0;
  for (; started < num_ranks; ++started) {
    const pid_t child = ::fork();  // first fork, then attach: handles don't survive fork()
    if (child == 0)
      std::exit(
          run_rank(static_cast<std::uint32_t>(started), static_cast<std::uint32_t>(num_ranks), name, socket));
    if (child < 0) {
      std::perror("fork");
      right = false;
      break;
    }
  }
  for (; started > 0; --started) {
    int state = 0;
    right = ::wait(&state) > 0 && WIFEXITED(state) && WEXITSTATUS(state) == 0 && right;
  }
  return right ? 0 : 1;
}
