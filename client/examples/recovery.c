/* Going on after failures: the loop of the guide, "Recovery".
 *
 *   recovery_c [BREAKS]
 *
 * Starts two processes that form one group on a running daemon ($EPD_SOCKET). They pass tokens to experts and
 * back, round after round, until the group has broken so often (default 0), and 10 rounds more. To see it go
 * on: start it with 1, then call "epctl restart device NAME" or kill an engine with -9. Exit code 0: every
 * rank got its tokens back in every round.
 */
#include <epd/epd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kRanks = 2, kTokens = 16, kHidden = 128, kExperts = 8, kRounds = 10 };

/* A round has two operations: dispatch and combine. Rounds take turns on two slots, because a rank that has
 * begun a round may have to repeat the combine of the one before. */
struct rounds {
  epd_group_t* group;
  epd_buffers_t buffers[2];
  epd_handle_t handle[2]; /* of the last dispatch on each slot */
  uint32_t rank;
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
      topk_idx[t] = (int32_t)((i / 2 + (uint64_t)t) % kExperts);
      b->topk_weights[t] = 1.0f;
    }
    epd_dispatch_args_t dispatch;
    epd_dispatch_args_init(&dispatch);
    dispatch.slot = slot;
    dispatch.num_tokens = kTokens;
    return epd_dispatch(r->group, &dispatch, EPD_NO_STREAM, ticket, &r->handle[slot]);
  }
  const size_t rows = (size_t)b->rank_offsets[kRanks];
  memcpy(b->y, b->recv_x, rows * kHidden * sizeof(uint16_t)); /* experts that change nothing */
  epd_combine_args_t combine;
  epd_combine_args_init(&combine);
  combine.slot = slot;
  combine.handle = r->handle[slot]; /* 0: dispatched before this rank took a lost one's place */
  return epd_combine(r->group, &combine, EPD_NO_STREAM, ticket);
}

static int is_right(const struct rounds* r, uint64_t i) {
  if (r->handle[i / 2 % 2] == 0) return 1; /* it had no tokens */
  const uint16_t* out = r->buffers[i / 2 % 2].out;
  for (int at = 0; at < kTokens * kHidden; ++at) {
    if (out[at] != token_bits(r->rank, i / 2, at / kHidden)) return 0;
  }
  return 1;
}

/* Where all ranks end, if the group has broken often enough: the first epoch is 1. */
static uint64_t last_round(uint64_t next, uint64_t breaks, uint64_t epoch) {
  return epoch > breaks ? next / 2 * 2 + 2 * kRounds : UINT64_MAX;
}

/* Runs operations in order, and repeats those that a break has undone. */
static epd_status_t run(struct rounds* r, uint64_t breaks, int* wrong) {
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  epd_ticket_t ticket = 0;
  uint64_t end = UINT64_MAX;
  for (uint64_t i = 0; i < end;) {
    epd_status_t status = epd_group_advance(r->group, &ticket, EPD_FOREVER, NULL, &info);
    if (status != EPD_OK) return status; /* the group has ended */
    const int ended_well = info.resume_op == i + 1;
    if (ended_well && i % 2 != 0) *wrong |= !is_right(r, i);
    i = info.resume_op; /* at first: where the group is */
    if (end == UINT64_MAX) end = last_round(i, breaks, info.epoch);
    status = i < end ? submit(r, i, &ticket) : EPD_OK;
    if (status != EPD_OK && !epd_is_break(status)) return status;
  }
  printf("rank %u: %llu operations right, epoch %llu\n", r->rank, (unsigned long long)end,
         (unsigned long long)info.epoch);
  return EPD_OK;
}

static int failed(uint32_t rank, const char* what, epd_status_t status) {
  fprintf(stderr, "rank %u: %s: %s: %s\n", rank, what, epd_status_name(status), epd_last_error());
  return 1;
}

static int run_rank(struct rounds* r, uint64_t breaks, const char* name) {
  epd_session_t* session = NULL;
  epd_status_t status = epd_session_attach(NULL, &session); /* any device of the daemon */
  if (status != EPD_OK) return failed(r->rank, "attach", status);

  epd_group_config_t config;
  epd_group_config_init(&config);
  config.name = name;
  config.rank = (int32_t)r->rank;
  config.num_ranks = kRanks;
  config.num_experts = kExperts;
  config.max_tokens = kTokens;
  config.hidden = kHidden;
  config.topk = 1;
  status = epd_group_join(session, &config, &r->group); /* blocks until all ranks are here */
  for (uint32_t slot = 0; status == EPD_OK && slot < 2; ++slot) {
    epd_buffers_init(&r->buffers[slot]);
    status = epd_group_buffers(r->group, slot, &r->buffers[slot]);
  }
  int bad = status != EPD_OK ? failed(r->rank, "join", status) : 0;
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
  const long breaks = argc > 1 ? strtol(argv[1], NULL, 10) : 0;
  char name[64]; /* of the group; the same in all ranks, and not that of another run */
  snprintf(name, sizeof(name), "recovery-c-%ld", (long)getpid());

  /* Fork first, attach afterwards: handles don't survive fork(). */
  const pid_t child = fork();
  if (child < 0) {
    perror("fork");
    return 1;
  }
  struct rounds r;
  memset(&r, 0, sizeof(r));
  r.rank = child == 0 ? 1 : 0;
  const int bad = run_rank(&r, (uint64_t)breaks, name);
  if (child == 0) return bad;
  int state = 0;
  return bad || wait(&state) < 0 || state != 0;
}
