/* One MoE layer as a CUDA graph: captured once, replayed with other tokens and other routing each time, and
 * no CPU on the way of an operation.
 *
 *   moe_graph_c [--ranks R] [SOCKET]
 *
 * Starts R processes (default 2), rank r on GPU r (in turn, if there are fewer), on a running daemon that
 * serves GPUs. Exit code 0: every rank found what it should.
 */
#include <cuda.h>
#include <epd/epd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kTokens = 16, kHidden = 256, kExpertsPerRank = 4, kReplays = 5, kTimeoutMs = 30000 };

/* Inputs and outputs, in pinned memory: each replay of a graph reads there again. */
typedef struct Host {
  uint16_t x[kTokens * kHidden];
  int32_t topk_idx[kTokens];
  uint16_t out[kTokens * kHidden];
} Host;

static int failed(const char* what, epd_status_t status) {
  fprintf(stderr, "%s: %s: %s\n", what, epd_status_name(status), epd_last_error());
  return 1;
}

static int cuda_failed(const char* what, CUresult result) {
  const char* name = NULL;
  if (result != CUDA_SUCCESS) cuGetErrorName(result, &name);
  if (result != CUDA_SUCCESS) fprintf(stderr, "%s: %s\n", what, name != NULL ? name : "unknown");
  return result != CUDA_SUCCESS;
}

/* Enqueues the layer: as often as it is replayed, the group has two operations more. Their tickets stay. */
static int enqueue_layer(epd_group_t* group, uint32_t num_ranks, CUstream stream, Host* host,
                         epd_ticket_t tickets[2]) {
  epd_buffers_t b; /* addresses of the GPU */
  epd_buffers_init(&b);
  epd_status_t status = epd_group_buffers(group, 0, &b);
  if (status != EPD_OK) return failed("buffers", status);
  if (cuda_failed("x", cuMemcpyHtoDAsync((CUdeviceptr)b.x, host->x, sizeof(host->x), stream)) ||
      cuda_failed("topk_idx", cuMemcpyHtoDAsync((CUdeviceptr)b.topk_idx, host->topk_idx,
                                                sizeof(host->topk_idx), stream))) {
    return 1;
  }
  epd_dispatch_args_t dispatch;
  epd_dispatch_args_init(&dispatch);
  dispatch.num_tokens = kTokens; /* or num_tokens_at: from the GPU's memory, another one each time */
  dispatch.omit_weights = 1;
  epd_handle_t handle = 0;
  status = epd_dispatch(group, &dispatch, stream, &tickets[0], &handle);
  if (status != EPD_OK) return failed("dispatch", status);

  /* Here a model launches its experts' kernels. These experts answer each row with the row. */
  const size_t rows = (size_t)num_ranks * kTokens * kHidden * sizeof(uint16_t);
  if (cuda_failed("experts", cuMemcpyDtoDAsync((CUdeviceptr)b.y, (CUdeviceptr)b.recv_x, rows, stream)))
    return 1;

  epd_combine_args_t combine;
  epd_combine_args_init(&combine);
  combine.handle = handle;
  status = epd_combine(group, &combine, stream, &tickets[1]);
  if (status != EPD_OK) return failed("combine", status);
  return cuda_failed("out", cuMemcpyDtoHAsync(host->out, (CUdeviceptr)b.out, sizeof(host->out), stream));
}

static int capture(epd_group_t* group, uint32_t num_ranks, CUstream stream, Host* host, CUgraphExec* exec,
                   epd_ticket_t tickets[2]) {
  if (cuda_failed("capture", cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))) return 1;
  const int bad = enqueue_layer(group, num_ranks, stream, host, tickets);
  CUgraph graph = NULL;
  if (cuda_failed("end of capture", cuStreamEndCapture(stream, &graph)) || bad) return 1;
  return cuda_failed("graph", cuGraphInstantiateWithFlags(exec, graph, 0)) ||
         cuda_failed("graph", cuGraphDestroy(graph));
}

static int replay(epd_group_t* group, uint32_t num_ranks, CUstream stream, Host* host, CUgraphExec exec,
                  const epd_ticket_t tickets[2]) {
  for (uint32_t step = 0; step < kReplays; ++step) {
    for (uint32_t t = 0; t < kTokens; ++t) {
      host->topk_idx[t] = (int32_t)((t * (step + 1) + epd_group_rank(group)) % (num_ranks * kExpertsPerRank));
      for (uint32_t h = 0; h < kHidden; ++h)
        host->x[t * kHidden + h] = (uint16_t)(0x3f80 + step + t + h % 16); /* bf16 numbers from 1 */
    }
    if (cuda_failed("launch", cuGraphLaunch(exec, stream)) ||
        cuda_failed("synchronize", cuStreamSynchronize(stream))) {
      return 1;
    }
    /* A stream goes on also if something fails; the tickets say so, of each replay anew. */
    for (int i = 0; i < 2; ++i) {
      epd_result_t result;
      epd_result_init(&result);
      const epd_status_t status = epd_ticket_wait(group, tickets[i], kTimeoutMs, &result);
      if (status != EPD_OK) return failed(i == 0 ? "dispatch" : "combine", status);
      if (result.runs != step + 1) {
        fprintf(stderr, "replay %u: the result is of replay %u\n", step, result.runs - 1);
        return 1;
      }
    }
    if (memcmp(host->out, host->x, sizeof(host->x)) != 0) {
      fprintf(stderr, "replay %u: what came back is not what was sent\n", step);
      return 1;
    }
  }
  return 0;
}

static int run_group(epd_session_t* session, int32_t rank, uint32_t num_ranks, const char* name) {
  epd_group_config_t config;
  epd_group_config_init(&config);
  config.name = name;
  config.rank = rank;
  config.num_ranks = num_ranks;
  config.num_experts = num_ranks * kExpertsPerRank;
  config.max_tokens = kTokens;
  config.hidden = kHidden;
  config.topk = 1;
  config.timeout_ms = kTimeoutMs;
  epd_group_t* group = NULL;
  const epd_status_t status = epd_group_join(session, &config, &group); /* blocks until all ranks are here */
  if (status != EPD_OK) return failed("join", status);
  CUstream stream = NULL;
  void* host = NULL;
  CUgraphExec exec = NULL;
  epd_ticket_t tickets[2] = {0, 0};
  int bad = cuda_failed("stream", cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)) ||
            cuda_failed("pinned memory", cuMemHostAlloc(&host, sizeof(Host), 0)) ||
            capture(group, num_ranks, stream, host, &exec, tickets) ||
            replay(group, num_ranks, stream, host, exec, tickets);
  if (!bad) printf("rank %d: %d replays right\n", (int)rank, (int)kReplays);
  epd_group_leave(group);
  return bad;
}

static int run_rank(int32_t rank, uint32_t num_ranks, const char* name, const char* socket_path) {
  int num_gpus = 0;
  CUdevice gpu = 0;
  CUcontext context = NULL; /* the one of the CUDA runtime, too */
  if (cuda_failed("init", cuInit(0)) || cuda_failed("count", cuDeviceGetCount(&num_gpus)) ||
      cuda_failed("device", cuDeviceGet(&gpu, rank % num_gpus)) ||
      cuda_failed("context", cuDevicePrimaryCtxRetain(&context, gpu)) ||
      cuda_failed("context", cuCtxSetCurrent(context))) {
    return 1;
  }
  char device[32]; /* as the daemon numbers them */
  snprintf(device, sizeof(device), "cuda:%d", (int)rank % num_gpus);
  epd_attach_options_t options;
  epd_attach_options_init(&options);
  options.socket_path = socket_path; /* NULL: $EPD_SOCKET */
  options.device = device;
  epd_session_t* session = NULL;
  const epd_status_t status = epd_session_attach(&options, &session);
  if (status != EPD_OK) return failed("attach", status);
  const int bad = run_group(session, rank, num_ranks, name);
  epd_session_detach(session);
  return bad;
}

int main(int argc, char** argv) {
  const int counted = argc > 2 && strcmp(argv[1], "--ranks") == 0;
  const long num_ranks = counted ? strtol(argv[2], NULL, 10) : 2;
  const char* socket_path = argc > (counted ? 3 : 1) ? argv[counted ? 3 : 1] : NULL;
  if (num_ranks < 1 || num_ranks > 32) {
    fprintf(stderr, "--ranks is %ld; allowed: 1 .. 32\n", num_ranks);
    return 2;
  }
  char name[64]; /* of the group; the same in all ranks, and not that of another run */
  snprintf(name, sizeof(name), "moe-graph-c-%ld", (long)getpid());
  for (int32_t rank = 0; rank < num_ranks; ++rank) { /* fork first: CUDA and handles don't survive it */
    const pid_t child = fork();
    if (child == 0) exit(run_rank(rank, (uint32_t)num_ranks, name, socket_path));
    if (child < 0) return perror("fork"), 1;
  }
  int bad = 0;
  for (int state = 0; wait(&state) > 0;) bad |= !WIFEXITED(state) || WEXITSTATUS(state) != 0;
  return bad;
}
