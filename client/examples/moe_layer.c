/* One Mixture-of-Experts layer with epd's C API: dispatch, experts, combine.
 *
 *   moe_layer_c [--ranks R] [SOCKET]
 *
 * Starts R processes (default 2) that form one group on a running daemon. Each makes up its tokens,
 * sends every token to the ranks of its K experts, lets the "experts" double what arrived, gets the sums
 * back, and checks them. Exit code 0: every rank found what it should.
 */
#include <epd/epd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kTokens = 16, kHidden = 256, kTopk = 2, kExpertsPerRank = 4, kSteps = 3, kTimeoutMs = 30000 };

/* bf16 is the upper half of a float32. The numbers of this example are small integers, which it holds
 * exactly, so the check below can be exact too. */
static uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return (uint16_t)(bits >> 16);
}

static float from_bf16(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

static float token_value(uint32_t rank, int token, int column) {
  return (float)((int)(rank * 3) + token % 5 + column % 3);
}

/* Selection k of a token: two experts, a fixed distance apart, so mostly on two ranks. */
static int32_t chosen_expert(uint32_t rank, int token, int k, uint32_t num_experts) {
  return (int32_t)((rank + (uint32_t)token + (uint32_t)k * kExpertsPerRank) % num_experts);
}

/* Prints what went wrong in the last call. */
static int failed(uint32_t rank, const char* what, epd_status_t status) {
  fprintf(stderr, "rank %u: %s: %s: %s\n", rank, what, epd_status_name(status), epd_last_error());
  return 1;
}

/* One forward pass on buffer slot `slot`. 0 when all is right. */
static int run_layer(epd_group_t* group, uint32_t slot, uint32_t num_ranks) {
  const uint32_t rank = epd_group_rank(group);
  const uint32_t num_experts = num_ranks * kExpertsPerRank;
  epd_buffers_t b;
  epd_buffers_init(&b);
  epd_status_t status = epd_group_buffers(group, slot, &b);
  if (status != EPD_OK) return failed(rank, "buffers", status);

  /* 1. The router's work: activations and the chosen experts go straight into the shared buffers. */
  uint16_t* x = b.x;
  int32_t* topk_idx = b.topk_idx;
  for (int t = 0; t < kTokens; ++t) {
    for (int h = 0; h < kHidden; ++h) x[t * kHidden + h] = to_bf16(token_value(rank, t, h));
    for (int k = 0; k < kTopk; ++k) {
      topk_idx[t * kTopk + k] = chosen_expert(rank, t, k, num_experts);
      b.topk_weights[t * kTopk + k] = 1.0f;
    }
  }

  /* 2. Dispatch returns at once; the ticket tells when the rows are here. */
  epd_dispatch_args_t dispatch;
  epd_dispatch_args_init(&dispatch);
  dispatch.slot = slot;
  dispatch.num_tokens = kTokens;
  epd_ticket_t ticket = 0;
  epd_handle_t handle = 0;
  status = epd_dispatch(group, &dispatch, EPD_NO_STREAM, &ticket, &handle);
  if (status != EPD_OK) return failed(rank, "dispatch", status);

  /* The counts come before the rows: time to size the experts' work. */
  epd_counts_t counts;
  epd_counts_init(&counts);
  status = epd_ticket_counts(group, ticket, kTimeoutMs, &counts);
  if (status != EPD_OK) return failed(rank, "counts", status);
  epd_result_t result;
  epd_result_init(&result);
  status = epd_ticket_wait(group, ticket, kTimeoutMs, &result);
  if (status != EPD_OK) return failed(rank, "dispatch", status);

  /* 3. The experts: each selected expert here returns the row as it is, so row i answers with the sum
   * over this rank's experts, that is, the row times the number of its selections here. */
  const uint16_t* recv_x = b.recv_x;
  const int32_t* recv_topk_idx = b.recv_topk_idx;
  uint16_t* y = b.y;
  for (uint32_t row = 0; row < result.num_recv_rows; ++row) {
    int selections = 0;
    for (int k = 0; k < kTopk; ++k) selections += recv_topk_idx[row * kTopk + (uint32_t)k] >= 0;
    for (uint32_t h = 0; h < kHidden; ++h) {
      y[row * kHidden + h] = to_bf16((float)selections * from_bf16(recv_x[row * kHidden + h]));
    }
  }

  /* 4. Combine adds up what the ranks answered for each token. */
  epd_combine_args_t combine;
  epd_combine_args_init(&combine);
  combine.slot = slot;
  combine.handle = handle;
  status = epd_combine(group, &combine, EPD_NO_STREAM, &ticket);
  if (status != EPD_OK) return failed(rank, "combine", status);
  status = epd_ticket_wait(group, ticket, kTimeoutMs, NULL);
  if (status != EPD_OK) return failed(rank, "combine", status);

  /* Every token met kTopk experts, each of which returned it: so kTopk times the token comes back. */
  const uint16_t* out = b.out;
  for (int t = 0; t < kTokens; ++t) {
    for (int h = 0; h < kHidden; ++h) {
      const float expected = (float)kTopk * token_value(rank, t, h);
      const float got = from_bf16(out[t * kHidden + h]);
      if (got != expected) {
        fprintf(stderr, "rank %u: token %d column %d is %g, expected %g\n", rank, t, h, (double)got,
                (double)expected);
        return 1;
      }
    }
  }
  return 0;
}

static int run_rank(uint32_t rank, uint32_t num_ranks, const char* name, const char* socket_path) {
  epd_attach_options_t options;
  epd_attach_options_init(&options);
  options.socket_path = socket_path; /* NULL: $EPD_SOCKET */
  epd_session_t* session = NULL;
  epd_status_t status = epd_session_attach(&options, &session);
  if (status != EPD_OK) return failed(rank, "attach", status);

  epd_group_config_t config;
  epd_group_config_init(&config);
  config.name = name;
  config.rank = (int32_t)rank;
  config.num_ranks = num_ranks;
  config.num_experts = num_ranks * kExpertsPerRank;
  config.max_tokens = kTokens;
  config.hidden = kHidden;
  config.topk = kTopk;
  config.depth = 2;
  config.timeout_ms = kTimeoutMs;
  epd_group_t* group = NULL;
  status = epd_group_join(session, &config, &group); /* blocks until all ranks are here */
  int bad = status != EPD_OK ? failed(rank, "join", status) : 0;
  for (uint32_t step = 0; !bad && step < kSteps; ++step) bad = run_layer(group, step % 2, num_ranks);
  if (!bad) printf("rank %u: %d layers right\n", rank, (int)kSteps);
  epd_group_leave(group); /* NULL is fine */
  epd_session_detach(session);
  return bad;
}

int main(int argc, char** argv) {
  long num_ranks = 2;
  const char* socket_path = NULL;
  for (int i = 1; i < argc; ++i) {
    if (strcmp(argv[i], "--ranks") == 0 && i + 1 < argc) {
      num_ranks = strtol(argv[++i], NULL, 10);
    } else if (argv[i][0] != '-') {
      socket_path = argv[i];
    } else {
      fprintf(stderr, "usage: %s [--ranks 2 .. 64] [SOCKET]\n", argv[0]);
      return 2;
    }
  }
  if (num_ranks < 2 || num_ranks > 64) {
    fprintf(stderr, "--ranks is %ld; allowed: 2 .. 64\n", num_ranks);
    return 2;
  }
  char name[64]; /* of the group; the same in all ranks, and not that of another run */
  snprintf(name, sizeof(name), "moe-layer-c-%ld", (long)getpid());

  /* Fork first, attach afterwards: handles don't survive fork(). */
  int bad = 0;
  long started = 0;
  for (; started < num_ranks; ++started) {
    const pid_t child = fork();
    if (child == 0) exit(run_rank((uint32_t)started, (uint32_t)num_ranks, name, socket_path));
    if (child < 0) {
      perror("fork");
      bad = 1;
      break;
    }
  }
  for (; started > 0; --started) {
    int state = 0;
    if (wait(&state) < 0 || !WIFEXITED(state) || WEXITSTATUS(state) != 0) bad = 1;
  }
  return bad;
}
