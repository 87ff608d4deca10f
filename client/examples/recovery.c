/* Going on after failures: the loop of the guide, "Recovery".
 *
 *   recovery_c [--ranks R] [--breaks N] [SOCKET]
 *
 * Starts R processes (default 2) that form one group on a running daemon. They pass tokens to experts and
 * back, round after round, until the group has broken N times (default 0), and 10 rounds more. To see it go
 * on: start it with --breaks 1, then call "epctl restart device NAME" or kill an engine with -9. Exit code 0:
 * every rank got its tokens back in every round.
 */
#include <epd/epd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { kTokens = 16, kHidden = 128, kExpertsPerRank = 4, kRounds = 10 };

/* A round has two operations: dispatch and combine. Rounds take turns on two slots, because a rank that has
 * begun a round may have to repeat the combine of the one before. */
struct rounds {
  epd_group_t* group;
  epd_buffers_t buffers[2];
  epd_handle_t handle[2]; /* of the last dispatch on each slot */
  uint32_t rank, num_ranks;
};

/* bf16 bits; any will do, as the experts change nothing. */
static uint16_t token_bits(uint32_t rank, uint64_t round, int token) {
  return (uint16_t)(0x3f80 + 97 * rank + 16 * (uint32_t)token + round % 16);
}

/* Submits operation i. It may have run before, here and on other ranks: so it makes its inputs again. */
static epd_status_t submit(struct rounds* r, uint64_t i, epd_ticket_t* ticket) {
  const uint32_t slot = (uint32_t)(i / 2 % 2);
  const epd_buffers_t* b = &r->buffers[slot];
  if (i % 2 == 0) {
    uint16_t* x = b->x;
    int32_t* topk_idx = b->topk_idx;
    for (int t = 0; t < kTokens; ++t) {
      for (int h = 0; h < kHidden; ++h) x[t * kHidden + h] = token_bits(r->rank, i / 2, t);
      topk_idx[t] = (int32_t)((i / 2 + (uint64_t)t) % (r->num_ranks * kExpertsPerRank));
      b->topk_weights[t] = 1.0f;
    }
    epd_dispatch_args_t dispatch;
    epd_dispatch_args_init(&dispatch);
    dispatch.slot = slot;
    dispatch.num_tokens = kTokens;
    return epd_dispatch(r->group, &dispatch, EPD_NO_STREAM, ticket, &r->handle[slot]);
  }
  const size_t rows = (size_t)b->rank_offsets[r->num_ranks];
  memcpy(b->y, b->recv_x, rows * kHidden * sizeof(uint16_t)); /* experts that change nothing */
  epd_combine_args_t combine;
  epd_combine_args_init(&combine);
  combine.slot = slot;
  combine.handle = r->handle[slot];
  return epd_combine(r->group, &combine, EPD_NO_STREAM, ticket);
}

static int is_right(const struct rounds* r, uint64_t i) {
  const uint16_t* out = r->buffers[i / 2 % 2].out;
  for (int at = 0; at < kTokens * kHidden; ++at) {
    if (out[at] != token_bits(r->rank, i / 2, at / kHidden)) return 0;
  }
  return 1;
}

static int is_break(epd_status_t status) {
  return status == EPD_RANK_LOST || status == EPD_DEADLINE_EXCEEDED || status == EPD_ENGINE_RESTARTED ||
         status == EPD_ABORTED;
}

/* Runs operations in order, and repeats those that a break has undone. */
static epd_status_t run(struct rounds* r, uint64_t breaks, int* wrong) {
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  uint64_t end = breaks == 0 ? 2 * kRounds : UINT64_MAX;
  uint64_t next = 0;
  epd_ticket_t ticket = 0; /* of operation `next`; 0: it is still to be submitted */
  while (next < end) {
    epd_status_t status = ticket == 0 ? submit(r, next, &ticket) : EPD_OK;
    if (status == EPD_OK) status = epd_ticket_wait(r->group, ticket, EPD_FOREVER, NULL);
    if (status == EPD_OK) {
      *wrong |= next % 2 != 0 && !is_right(r, next);
      ticket = 0;
      ++next;
    } else if (status == EPD_WOULD_BLOCK) { /* the slot is busy, or the ring is full */
      const struct timespec millisecond = {0, 1000000};
      nanosleep(&millisecond, NULL);
    } else if (!is_break(status)) {
      return status;
    } else if (ticket == 0 ||
               !epd_ticket_pending(r->group, ticket)) { /* else: it only takes longer, wait again */
      ticket = 0;
      status = epd_group_resume(r->group, EPD_FOREVER, &info);
      if (status != EPD_OK) return status; /* the group has ended */
      next = info.resume_op;
      if (end == UINT64_MAX && info.epoch > breaks) end = next / 2 * 2 + 2 * kRounds;
    }
  }
  printf("rank %u: %llu operations right, epoch %llu\n", r->rank, (unsigned long long)end,
         (unsigned long long)(info.epoch != 0 ? info.epoch : 1));
  return EPD_OK;
}

static int failed(uint32_t rank, const char* what, epd_status_t status) {
  fprintf(stderr, "rank %u: %s: %s: %s\n", rank, what, epd_status_name(status), epd_last_error());
  return 1;
}

static int run_rank(struct rounds* r, uint64_t breaks, const char* name, const char* socket_path) {
  epd_attach_options_t options;
  epd_attach_options_init(&options);
  options.socket_path = socket_path; /* NULL: $EPD_SOCKET */
  epd_session_t* session = NULL;
  epd_status_t status = epd_session_attach(&options, &session);
  if (status != EPD_OK) return failed(r->rank, "attach", status);

  epd_group_config_t config;
  epd_group_config_init(&config);
  config.name = name;
  config.rank = (int32_t)r->rank;
  config.num_ranks = r->num_ranks;
  config.num_experts = r->num_ranks * kExpertsPerRank;
  config.max_tokens = kTokens;
  config.hidden = kHidden;
  config.topk = 1;
  int bad = 0;
  status = epd_group_join(session, &config, &r->group); /* blocks until all ranks are here */
  if (status != EPD_OK) bad = failed(r->rank, "join", status);
  for (uint32_t slot = 0; !bad && slot < 2; ++slot) {
    epd_buffers_init(&r->buffers[slot]);
    status = epd_group_buffers(r->group, slot, &r->buffers[slot]);
    if (status != EPD_OK) bad = failed(r->rank, "buffers", status);
  }
  if (!bad) {
    printf("rank %u: joined\n", r->rank);
    fflush(stdout);
    int wrong = 0;
    status = run(r, breaks, &wrong);
    if (status != EPD_OK) bad = failed(r->rank, "run", status);
    if (wrong) fprintf(stderr, "rank %u: a token came back wrong\n", r->rank);
    bad |= wrong;
  }
  epd_group_leave(r->group); /* NULL is fine */
  epd_session_detach(session);
  return bad;
}

int main(int argc, char** argv) {
  long num_ranks = 2;
  long breaks = 0;
  const char* socket_path = NULL;
  for (int i = 1; i < argc; ++i) {
    if (strcmp(argv[i], "--ranks") == 0 && i + 1 < argc) {
      num_ranks = strtol(argv[++i], NULL, 10);
    } else if (strcmp(argv[i], "--breaks") == 0 && i + 1 < argc) {
      breaks = strtol(argv[++i], NULL, 10);
    } else if (argv[i][0] != '-') {
      socket_path = argv[i];
    } else {
      fprintf(stderr, "usage: %s [--ranks 1 .. 64] [--breaks N] [SOCKET]\n", argv[0]);
      return 2;
    }
  }
  if (num_ranks < 1 || num_ranks > 64 || breaks < 0) {
    fprintf(stderr, "--ranks is %ld, --breaks %ld; allowed: 1 .. 64, 0 or more\n", num_ranks, breaks);
    return 2;
  }
  char name[64]; /* of the group; the same in all ranks, and not that of another run */
  snprintf(name, sizeof(name), "recovery-c-%ld", (long)getpid());

  /* Fork first, attach afterwards: handles don't survive fork(). */
  int bad = 0;
  long started = 0;
  for (; started < num_ranks; ++started) {
    const pid_t child = fork();
    if (child == 0) {
      struct rounds r;
      memset(&r, 0, sizeof(r));
      r.rank = (uint32_t)started;
      r.num_ranks = (uint32_t)num_ranks;
      exit(run_rank(&r, (uint64_t)breaks, name, socket_path));
    }
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
