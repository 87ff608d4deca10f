/* libepd: the thin client of epd, the expert-parallel communication daemon.
 *
 * Conventions
 * 1. Every call that can fail returns epd_status_t; EPD_OK is 0. epd_last_error() then holds, for the
 *    calling thread, a sentence with the value that was wrong and what is allowed.
 * 2. Handles are opaque. What a call creates, its counterpart destroys: attach/detach, join/leave. A handle
 *    that is used after that gives INVALID_ARGUMENT (a group's also after its session's detach), and so
 *    does a second detach or leave.
 * 3. Structs begin with `size`. epd_<struct>_init sets it, and makes everything else zero: the default of
 *    every field that may be left out. A library newer than the caller treats missing fields as zero; an
 *    older one refuses unknown non-zero fields.
 * 4. Thread safety: all calls may be made from any thread, also on one session at once, with two
 *    exceptions: submissions to one group keep their order only if the caller orders them, and
 *    epd_session_detach / epd_group_leave must not race with other calls on the same handle. No call waits
 *    for another's: a join that waits for its ranks holds up neither other joins of its session nor a leave.
 * 5. No call blocks, except those with a timeout, and leave and detach: these wait for the hooks of what
 *    they end, and up to 5 seconds for the daemon.
 * 6. A timeout is an int32_t timeout_ms, everywhere. 1 or more are milliseconds. 0 is the default, which
 *    each call tells. Calls that wait for what has been submitted, or in epd_group_resume for the group, also
 *    take EPD_FOREVER, their default: until it has ended, or agreed; and EPD_NO_WAIT: they look and return at
 *    once. All else is refused. An operation ends: the daemon puts a deadline on every one. Should this
 *    device's engine be stopped (SIGSTOP, a debugger), a wait with EPD_FOREVER ends with DEADLINE_EXCEEDED 5
 *    seconds after that deadline, the ticket still pending.
 * 7. No callback runs inside a call of yours: completion hooks run on a thread of the library.
 *    A hook may call anything but detach and leave.
 * 8. After fork() the handles made before it are the parent's. In the child every call on them gives
 *    INVALID_ARGUMENT and names the process that attached; also leave and detach, which do nothing. The
 *    child may attach anew. (On CUDA devices it can't use the driver if the parent has.)
 *
 * Shapes are row-major. n = tokens of this rank in one call (0 <= n <= max_tokens), R ranks,
 * E experts, T = max_tokens, H = hidden, K = topk, M = rows received. Expert e lives on rank
 * e / (E/R).
 */
#ifndef EPD_EPD_H_
#define EPD_EPD_H_

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EPD_VERSION_MAJOR 0
#define EPD_VERSION_MINOR 1
#define EPD_VERSION_PATCH 0

#if defined(__GNUC__)
#define EPD_API __attribute__((visibility("default")))
#else
#define EPD_API
#endif

typedef enum epd_status {
  EPD_OK = 0,
  EPD_WOULD_BLOCK = 1, /* no room now, or not finished: try again later */
  EPD_INVALID_ARGUMENT = 2,
  EPD_NOT_FOUND = 3,
  EPD_PERMISSION_DENIED = 4,
  EPD_RESOURCE_EXHAUSTED = 5, /* a quota or limit of the daemon */
  EPD_UNSUPPORTED = 6,
  EPD_VERSION_MISMATCH = 7,
  EPD_DEADLINE_EXCEEDED = 8,
  EPD_RANK_LOST = 9, /* a peer left or died: the group has ended, or goes on without it (epd_policy_t) */
  EPD_ENGINE_RESTARTED = 10, /* the device's engine died and is back; epd_group_resume, then redo */
  EPD_DAEMON_LOST = 11,      /* detach and attach again */
  EPD_ABORTED = 12,
  EPD_INTERNAL = 13
} epd_status_t;

/* Values of timeout_ms, see convention 6. */
#define EPD_FOREVER (-1)
#define EPD_NO_WAIT (-2)
/* In place of a cudaStream_t: in no stream. NULL is a stream, CUDA's legacy default one. */
#define EPD_NO_STREAM ((void*)(intptr_t)-1)

typedef struct epd_session epd_session_t; /* one attachment to one device */
typedef struct epd_group epd_group_t;     /* one rank's membership in a group */
typedef uint64_t epd_ticket_t;            /* one operation in flight; 0 is never a ticket */
typedef uint64_t epd_handle_t;            /* the routing that one dispatch established; never 0 */

/* "0.1.0" */
EPD_API const char* epd_version(void);
/* "RANK_LOST" and so on; never NULL. */
EPD_API const char* epd_status_name(epd_status_t status);
/* What went wrong in this thread's last call that failed; "" if none has. Valid until the next. */
EPD_API const char* epd_last_error(void);

/* ---- sessions ------------------------------------------------------------------------------ */

/* By what streams tell the engine that an operation may begin, and wait for its end. See "Streams". */
typedef enum epd_wait_by {
  EPD_WAIT_BY_MEMOP = 0, /* MEMOP wait: stream memory operations, which use no SM while the stream waits */
  EPD_WAIT_BY_KERNEL = 1 /* KERNEL wait: a kernel of one thread, which has less latency */
} epd_wait_by_t;

typedef struct epd_attach_options {
  size_t size;
  const char* socket_path; /* NULL: $EPD_SOCKET, else /run/epd/epd.sock */
  const char* device;      /* "host:0"; NULL: the least used device */
  int32_t timeout_ms;      /* for the whole handshake; 0: 5000 */
  epd_wait_by_t wait_by; /* of all the session's streams; 0: $EPD_WAIT_BY ("memop", "kernel") if it is set */
} epd_attach_options_t;
static inline void epd_attach_options_init(epd_attach_options_t* options) {
  memset(options, 0, sizeof(*options));
  options->size = sizeof(*options);
}

typedef enum epd_device_kind { EPD_DEVICE_KIND_HOST = 0, EPD_DEVICE_KIND_CUDA = 1 } epd_device_kind_t;

typedef struct epd_session_info_s {
  size_t size;
  uint64_t session_id;
  char device[32];
  char daemon[64];  /* name and version of the daemon */
  char boot_id[33]; /* hexadecimal; another one after a reconnect means another daemon run */
  epd_device_kind_t device_kind;
  uint32_t resident; /* 1: operations are calls of the device's resident kernel, see "Calls" */
} epd_session_info_t;
static inline void epd_session_info_init(epd_session_info_t* info) {
  memset(info, 0, sizeof(*info));
  info->size = sizeof(*info);
}

/* options may be NULL. Errors: DAEMON_LOST (nobody listens), VERSION_MISMATCH (names both
 * versions), PERMISSION_DENIED, RESOURCE_EXHAUSTED (quota), NOT_FOUND (no such device),
 * DEADLINE_EXCEEDED, INVALID_ARGUMENT (also: a CUDA device that this process does not see), UNSUPPORTED (a
 * CUDA device, and no driver in this process, or no kernels to wait by), WOULD_BLOCK (MPS recovers from a
 * fault on the GPU and takes no process yet: try again), INTERNAL. On a CUDA device the
 * session lives in the calling thread's current context if that is on the device, else in the device's
 * primary context, which is the CUDA runtime's; that context must outlive the session. Devices are matched by
 * uuid: their numbers here and in the daemon may differ. Attach before streams of the context wait for other
 * sessions' operations: attaching loads kernels, which may have to wait for what runs there. */
EPD_API epd_status_t epd_session_attach(const epd_attach_options_t* options, epd_session_t** session);
/* Leaves all groups, ends operations in flight (their rows may or may not have moved), frees the
 * handle. NULL is allowed. Whatever the daemon does, the session is over then: OK. INVALID_ARGUMENT, and
 * nothing is done: the session is detached already, or the caller is a hook or a forked child. */
EPD_API epd_status_t epd_session_detach(epd_session_t* session);
EPD_API epd_status_t epd_session_info(const epd_session_t* session, epd_session_info_t* info);
/* OK while the daemon is there; DAEMON_LOST, or the status the daemon ended this session with. */
EPD_API epd_status_t epd_session_check(const epd_session_t* session);

/* ---- groups -------------------------------------------------------------------------------- */

typedef enum epd_payload {
  EPD_PAYLOAD_BF16 = 0,
  EPD_PAYLOAD_FP8_CAST = 1, /* bf16 in, e4m3 out with one scale (amax/448) per 1x128 block */
  EPD_PAYLOAD_FP8 = 2,      /* e4m3 and its scales in, the same out */
  EPD_PAYLOAD_OPAQUE = 3    /* rows of opaque_bytes, delivered as they are */
} epd_payload_t;

/* Scales of e4m3 rows. */
typedef enum epd_scale_format {
  EPD_SCALE_FORMAT_FLOAT32 = 0,      /* float32 [.,H/128] */
  EPD_SCALE_FORMAT_FLOAT32_POW2 = 1, /* the same, rounded up to a power of two; FP8_CAST only */
  /* Exponent bytes (e + 127) of powers of two, 4 to an int32: int32 [.,ceil(H/512)]. */
  EPD_SCALE_FORMAT_UE8M0 = 2
} epd_scale_format_t;

/* How received rows lie. All are deterministic: places follow from counts, never from arrival. */
typedef enum epd_layout {
  EPD_LAYOUT_COMPACT = 0, /* one row per (token, rank), by source rank, then token: prefill, training */
  EPD_LAYOUT_PACKED = 1,  /* one row per (token, local expert), by expert, each expert's first row aligned:
                             contiguous grouped GEMM */
  EPD_LAYOUT_EXPERT = 2   /* the same rows, each expert in a block of its own: masked grouped GEMM, decode */
} epd_layout_t;

typedef enum epd_index_type { EPD_INDEX_TYPE_INT32 = 0, EPD_INDEX_TYPE_INT64 = 1 } epd_index_type_t;

typedef enum epd_policy {
  EPD_POLICY_FAIL_FAST = 0, /* a lost rank ends the group */
  /* A lost rank (dead, left, evicted) costs the group its operations in flight, which end with RANK_LOST on
   * the others; after epd_group_resume they go on without it. To one that was evicted epd_group_resume says
   * RANK_LOST. Selections of its experts then count as none, and epd_result_t tells how many were dropped. So
   * do, in a combine, rows of an earlier dispatch that it held. A new process may take its place: it joins
   * the same name in the same shape. That ends the operations in flight with ABORTED ("rank 2 has rejoined"),
   * and after epd_group_resume all go on with it. It begins at the resume_op that epd_group_resume gives it;
   * if that is a combine of a dispatch before its time, it takes part without tokens (a handle has the same
   * value on all ranks). */
  EPD_POLICY_DEGRADE = 1
} epd_policy_t;

/* The regions of a buffer slot; what each holds is told at epd_buffers_t. */
typedef enum epd_region {
  EPD_REGION_X = 0,
  EPD_REGION_X_SCALES = 1,
  EPD_REGION_TOPK_IDX = 2,
  EPD_REGION_TOPK_WEIGHTS = 3,
  EPD_REGION_RECV_X = 4,
  EPD_REGION_RECV_SCALES = 5,
  EPD_REGION_RECV_TOPK_IDX = 6,
  EPD_REGION_RECV_TOPK_WEIGHTS = 7,
  EPD_REGION_RECV_SRC = 8,
  EPD_REGION_RANK_OFFSETS = 9,
  EPD_REGION_EXPERT_COUNTS = 10,
  EPD_REGION_EXPERT_OFFSETS = 11,
  EPD_REGION_SOURCE_RANGES = 12,
  EPD_REGION_Y = 13,
  EPD_REGION_Y_WEIGHTS = 14,
  EPD_REGION_BIAS_0 = 15,
  EPD_REGION_BIAS_1 = 16,
  EPD_REGION_OUT = 17,
  EPD_REGION_OUT_WEIGHTS = 18
} epd_region_t;

/* A region in memory of your own, in place of the group's: the operations read and write it there, nothing is
 * copied, and the daemon makes no memory for it. It holds for all slots and as long as the membership.
 *
 * The memory must be an allocation that can be passed on by descriptor:
 *   CUDA device  cuMemCreate on this session's GPU with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, exported by
 *                cuMemExportToShareableHandle (not cudaMalloc's)
 *   host device  a memfd (memfd_create, MFD_ALLOW_SEALING) that has been given its size and F_SEAL_SHRINK, of
 *                ordinary pages
 * Several bindings may name one descriptor, and they may overlap where the operations allow: y on top of
 * recv_x, for experts that work in place. The descriptor may be closed when the join has returned.
 *
 * Rows of an operation that is in flight when the group is left may still arrive after epd_group_leave: to
 * use the memory for something else, wait for your operations first. */
typedef struct epd_binding {
  size_t size;
  epd_region_t region;
  int fd;
  uint64_t offset; /* of slot 0's in the memory: a multiple of 128 */
  uint64_t stride; /* from slot to slot: a multiple of 128, at least epd_region_bytes; 0: that, rounded up */
  void* address; /* where this process has mapped slot 0's: what epd_group_buffers gives, + slot * stride. On
                    a CUDA device an address of the device */
} epd_binding_t;
static inline void epd_binding_init(epd_binding_t* binding) {
  memset(binding, 0, sizeof(*binding));
  binding->size = sizeof(*binding);
}

#define EPD_ANY_RANK (-1)

/* All ranks must agree on everything but rank, timeout_ms, sms, priority and bindings. */
typedef struct epd_group_config {
  size_t size;
  const char* name;     /* 1..63 characters of [A-Za-z0-9._-] */
  int32_t rank;         /* 0..num_ranks-1, or EPD_ANY_RANK: any free one */
  uint32_t num_ranks;   /* R 1..1024 */
  uint32_t num_experts; /* E: a multiple of R, at most 4096 */
  uint32_t max_tokens;  /* T 1..65536; fixes the size of the buffers */
  uint32_t hidden;      /* H: a multiple of 128, at most 16384 */
  uint32_t topk;        /* K 1..32 */
  uint32_t depth;       /* buffer slots = operations in flight, 1..16; 0: 4 */
  epd_payload_t payload;
  epd_index_type_t index_type;
  epd_policy_t policy;
  uint32_t sms;       /* SMs (host: threads) of the device to use; 0: the device's default */
  int32_t timeout_ms; /* to wait for all ranks; 0: the daemon's default */
  epd_layout_t layout;
  epd_scale_format_t scale_format;
  uint32_t expert_alignment; /* rows, 1..256; 0: 1. Packed: of each expert's first row. Compact: expert_counts
                                are rounded up to it */
  uint32_t opaque_bytes;     /* of a row: a multiple of 16 up to 65536; EPD_PAYLOAD_OPAQUE only */
  uint32_t num_biases;       /* bias regions that combine may add, 0..2 */
  uint32_t num_handles;      /* routings that epd_dispatch may keep, 0..4096 */
  uint32_t max_recv_rows; /* rows of recv_x and y (layout expert: of each expert's block); 0: the worst case.
                             A dispatch that would need more fails with RESOURCE_EXHAUSTED on all ranks */
  int32_t priority; /* of this rank's operations among those of its device: -8 .. 7, higher goes first */
  const epd_binding_t* bindings; /* regions that this rank keeps in memory of its own, each at most once */
  uint32_t num_bindings;
} epd_group_config_t;
static inline void epd_group_config_init(epd_group_config_t* config) {
  memset(config, 0, sizeof(*config));
  config->size = sizeof(*config);
}

/* Blocks until all R ranks have joined. Any number of threads may join at once, each another group or rank.
 * Errors: INVALID_ARGUMENT (names the field; for a mismatch with the ranks already there, both values; the
 * rank is taken, also by a join that still waits), DEADLINE_EXCEEDED (names the missing ranks; a rank that
 * rejoins: the group has not agreed in time; or the daemon has said nothing for 5 seconds longer: should it
 * make this rank a member after all, the library leaves again), RESOURCE_EXHAUSTED (a quota or limit, which
 * it names; also: 64 joins of this session wait already), UNSUPPORTED, DAEMON_LOST. Memory that can't be
 * bound: INVALID_ARGUMENT, which names the region; what only an engine finds out ends the joins of all ranks,
 * and names the rank. */
EPD_API epd_status_t epd_group_join(epd_session_t* session, const epd_group_config_t* config,
                                    epd_group_t** group);
/* Bytes of a region in one slot of such a group, before it is joined; 0 if it would have no such region.
 * Errors: INVALID_ARGUMENT (the shape, or the region). name, rank and bindings are not looked at. */
EPD_API epd_status_t epd_region_bytes(const epd_group_config_t* config, epd_region_t region, uint64_t* bytes);

/* What the daemon makes of memory for a group. On a CUDA device the user arena and the exchange arena are on
 * it, and the driver rounds each up to a whole allocation unit, 2 MiB as a rule. On a host device pages that
 * nobody has touched are not used yet. Beside these, bound regions are memory of the caller's. */
typedef struct epd_group_bytes_s {
  size_t size;
  uint64_t user_arena;      /* of a rank: its regions in `depth` slots, but those that are bound */
  uint64_t exchange_arena;  /* of a rank: what ranks write to each other, and the next two */
  uint64_t routing_records; /* in it: depth + num_handles records */
  uint64_t inboxes;         /* in it: for rows of `depth` operations with few tokens; 0: there are none */
  uint64_t board;           /* of a rank: its state for the client, in host memory */
  uint64_t results;         /* of a rank: of its calls, in host memory; 0 on host devices */
  uint64_t rank;            /* user_arena + exchange_arena + board + results */
  uint64_t group;           /* num_ranks * rank, if all bind the same regions */
  uint64_t arena_quota;   /* of a rank, against limits.max_arena_bytes_per_user: rank; on a host device bound
                             regions count as if they were in the arena */
  uint64_t routing_quota; /* of a rank, against limits.max_routing_bytes_per_user: the most that the engine of
                             a host device keeps of routings in its own memory; 0 on a CUDA device */
} epd_group_bytes_t;
static inline void epd_group_bytes_init(epd_group_bytes_t* bytes) {
  memset(bytes, 0, sizeof(*bytes));
  bytes->size = sizeof(*bytes);
}

/* What such a group takes on devices of the kind, before it is joined. Of bindings only the regions are
 * looked at, name and rank are not. Errors: INVALID_ARGUMENT, as of epd_group_join. */
EPD_API epd_status_t epd_group_bytes(const epd_group_config_t* config, epd_device_kind_t kind,
                                     epd_group_bytes_t* bytes);

/* Operations that peers have in flight and that need nothing more of this rank still complete;
 * others, and later ones, end with RANK_LOST. (EPD_POLICY_DEGRADE: all in flight.) NULL is allowed. On a CUDA
 * device it returns, like cudaFree, when all that was enqueued in the session's context has run: the regions
 * are gone. What it returns: as epd_session_detach. */
EPD_API epd_status_t epd_group_leave(epd_group_t* group);
/* UINT32_MAX if the handle may not be used. */
EPD_API uint32_t epd_group_rank(const epd_group_t* group);
/* 1 while the rank takes part in the group's operations; 0 if it is lost (EPD_POLICY_DEGRADE), or no rank of
 * it. */
EPD_API int epd_group_active(const epd_group_t* group, uint32_t rank);

/* The regions of one buffer slot, in this rank's arena or where it has bound them, shared with the engine:
 * nothing is copied between you and it. A region may be written until the operation that reads it is
 * submitted, and again when that has completed (or says that it reads it no more, see defer_receive); an
 * output is valid from completion until the next operation is submitted on the slot (in a stream: until that
 * begins). On a CUDA device these are addresses of the device.
 *
 * row = one received row: H bf16, H e4m3, or opaque_bytes. rows = max_recv_rows, or in the worst case:
 * compact R*T; packed R*T*min(K, E/R) + E/R*(expert_alignment-1); expert E/R blocks of R*T. C = K (compact)
 * or 1. */
typedef struct epd_buffers {
  size_t size;
  void* x;             /* in  [T] rows as given: H bf16 (also for FP8_CAST), H e4m3, or opaque_bytes */
  void* topk_idx;      /* in  [T,K] int32 or int64; -1 = no selection */
  float* topk_weights; /* in  [T,K] */
  void* recv_x;        /* out [rows]; compact: M rows are valid, by source rank, then token; packed: expert
                          e's are [expert_offsets[e], + expert_counts[e]), by source rank, then token;
                          expert: the same */
  void* recv_scales;   /* out [rows] x scale_format; NULL unless FP8 */
  void* recv_topk_idx; /* out [rows,C] index type: local expert numbers, -1 elsewhere */
  float* recv_topk_weights; /* out [rows,C]; 0 elsewhere. Packed, expert: the sum of the token's weights of
                               the expert, in order of k */
  int32_t* recv_src;        /* out [rows,2]: source rank, token there */
  int32_t* rank_offsets;    /* out [R+1]: tokens received from rank r are [r]..[r+1]; compact: its rows */
  int32_t* expert_counts;   /* out [E/R]: compact: selections per local expert; else its rows */
  void* y;                  /* in  [rows,H] bf16: one row per received row, the input of combine */
  void* out;                /* out [T,H] bf16 */
  void* x_scales;           /* in  [T] x scale_format; NULL unless EPD_PAYLOAD_FP8 */
  int32_t* expert_offsets;  /* out [E/R+1]: first row of each local expert; the last: end of the rows (packed:
                               with padding). NULL if compact */
  int32_t* source_ranges;   /* out [E/R,R,2]: first row and number of rows of (expert, source rank). NULL if
                               compact */
  float* y_weights;         /* in  [rows,C]: gradients of recv_topk_weights, for combine's return_weights */
  void* bias[2];            /* in  [T,H] bf16; NULL beyond num_biases */
  float* out_weights;       /* out [T,K]: gradients of topk_weights */
} epd_buffers_t;
static inline void epd_buffers_init(epd_buffers_t* buffers) {
  memset(buffers, 0, sizeof(*buffers));
  buffers->size = sizeof(*buffers);
}

EPD_API epd_status_t epd_group_buffers(const epd_group_t* group, uint32_t slot, epd_buffers_t* buffers);

typedef struct epd_resume_info {
  size_t size;
  uint64_t epoch;
  uint64_t resume_op;        /* the first operation that not every rank completed: redo from here */
  uint32_t num_active_ranks; /* fewer than num_ranks: others are lost (EPD_POLICY_DEGRADE) */
  uint32_t reserved;
} epd_resume_info_t;
static inline void epd_resume_info_init(epd_resume_info_t* info) {
  memset(info, 0, sizeof(*info));
  info->size = sizeof(*info);
}

/* After an operation has failed for the whole group (ENGINE_RESTARTED, DEADLINE_EXCEEDED,
 * INVALID_ARGUMENT between ranks; EPD_POLICY_DEGRADE: RANK_LOST, ABORTED), every rank calls this, then
 * resubmits from resume_op on. Until then submissions return that status again. Blocks until the group has
 * agreed, at most timeout_ms (0: EPD_FOREVER): that takes as long as an engine of the group is stopped.
 * WOULD_BLOCK (EPD_NO_WAIT) or DEADLINE_EXCEEDED: it has not agreed yet. Until it has, peers may still write
 * into the recv regions of operations that have failed. RANK_LOST: the group has ended; leave. OK at once if
 * nothing was wrong. info may be NULL. What to redo may include an operation that this rank has completed and
 * whose slot it has refilled since: keep what you need to submit operation i again (handle, number of tokens,
 * inputs) until operation i + depth has completed here; then every rank has completed i. */
EPD_API epd_status_t epd_group_resume(epd_group_t* group, int32_t timeout_ms, epd_resume_info_t* info);

typedef struct epd_progress {
  size_t size;
  uint64_t next_op; /* all of the group's operations below have been completed on this rank */
  uint32_t ended;   /* calls that have ended, cyclic; 0 where operations are no calls */
  uint32_t failed;  /* of these, how many were not carried out, since the join */
} epd_progress_t;
static inline void epd_progress_init(epd_progress_t* progress) {
  memset(progress, 0, sizeof(*progress));
  progress->size = sizeof(*progress);
}

/* OK if the group can be used and, where operations are calls, all that had ended before this one were
 * carried out since the last epd_group_resume. Else the status of the group's break, with its text: waits for
 * the group to say it, up to 5 seconds and as long as the engine is away. With calls some tens of
 * microseconds; it waits for none: to know of those in a stream, synchronise it first. ABORTED: calls were
 * discarded, but the group is well: they were enqueued while it was being resumed. progress may be NULL. */
EPD_API epd_status_t epd_group_check(epd_group_t* group, epd_progress_t* progress);

/* ---- operations ----------------------------------------------------------------------------
 * All ranks submit the same operations of a group in the same order, on the same slots, under the same
 * handles (or none). All other arguments concern this rank's own rows and may differ; num_tokens may be 0. A
 * submission returns at once. WOULD_BLOCK: the slot has an operation in flight; or one on another slot makes
 * the routing that is to be used, or uses the one that would be replaced; or the session's ring is full (64
 * submissions that the engine has not taken; once streams are used: 60 operations whose end no call has
 * looked for, any submission looks). Nothing was submitted then. Operations in flight are no
 * hindrance if they and the new one were submitted in the same stream: then the stream gives the order (see
 * below).
 *
 * Streams. `stream` of a submission is EPD_NO_STREAM, or on a CUDA device (epd_session_info) a cudaStream_t
 * or CUstream. With EPD_NO_STREAM an operation begins at once, and the regions that it reads must be complete
 * by then. In a stream it begins when what was enqueued in the stream before the call is done, and what is
 * enqueued in it after the call begins when the operation has ended. With defer_receive the stream does not
 * wait until epd_ticket_wait_on_stream makes it. No call waits for the device (only, like CUDA's own, for
 * room in a stream's queue). A stream always goes on, however the operation ends: whether its outputs are
 * good, the ticket's status tells, which must be waited for or given a hook as ever. Deadlines count from the
 * submission, so they include what the stream had to do before. The stream must be of the context in which
 * the session is (see epd_session_attach), must not be capturing a graph, and must live until its operations
 * have ended; cudaStreamPerThread is not taken for one stream. NULL and cudaStreamLegacy are one stream,
 * the legacy default stream, also in a program compiled with
 * --default-stream per-thread, where CUDA's own calls take NULL for another: pass cudaStreamPerThread there.
 * The slot's next operation after one that failed belongs on the same stream, or on another after that one
 * has been synchronised. Errors beside each function's own: INVALID_ARGUMENT (a stream, and not a CUDA
 * device); INTERNAL with the driver's error: if *ticket was set, the operation was submitted and only the
 * stream does not wait for it (KERNEL wait without defer_receive: nor lets it begin).
 *
 * epd_attach_options_t::wait_by says, for all streams of a session, by what a stream and the engine wait for
 * each other. A MEMOP wait, the default, uses nothing of the GPU meanwhile. With a KERNEL wait the hand-off
 * is shorter by some microseconds: one kernel of one thread says that the operation may begin and waits for
 * its end, on an SM that it shares with other kernels; with defer_receive one says the first and is gone, and
 * epd_ticket_wait_on_stream enqueues another. Both are released whatever ends: operation, engine, group,
 * session or daemon. A kernel also goes on by itself 5 seconds after the operation's deadline, as waits of
 * the CPU do (convention 6). It is meant for an engine that is resident on its SMs: one that launches a
 * kernel for each operation may find an SM taken by the very wait. While a kernel waits: under MPS, killing
 * this process faults its GPU for all processes there, as with any kernel of yours; and what makes CUDA wait
 * for all of the context waits for it too (loading a kernel at its first launch, cudaFree), so load yours
 * before (CUDA_MODULE_LOADING=EAGER, or a first run).
 *
 * Many operations of one stream may be in flight, also on one slot: dispatch, kernels of the caller's,
 * combine under that dispatch's handle, the next dispatch on the slot and so on can be submitted before
 * anything has run; a failure of the group ends all of them. What of a slot is read by the host meanwhile
 * (counts) may be that of a later operation. With defer_receive the stream is to wait for the operation
 * before it touches the slot again. */

/* Calls. Where the daemon's kernels are resident (epd_session_info_t::resident) operations are calls of such
 * a kernel, and no engine is in their path. In a stream, a kernel of one thread makes the call when the
 * stream gets there, and (without defer_receive) waits for its end. So a stream that captures a graph may be
 * used, and the graph replayed any number of times, each time a new operation with what the regions hold
 * then. Without a stream, libepd makes the call at once by a copy; no SM of the caller's is needed.
 * Differences:
 *   - The order of the group's operations is that in which their calls come to the kernel: for one stream its
 *     own, without streams that of submission. Others are ordered by events, or by waiting.
 *   - num_tokens_at gives n from device memory, at the time the stream gets there. More than max_tokens is an
 *     illegal call, which ends the session.
 *   - A handle names a routing record and not one dispatch: used by a combine, it means the last dispatch
 *     that wrote the record before. What the routing of slot s is, each new dispatch on s replaces.
 *   - Nothing has to be asked of a ticket. Results are kept of the rank's last 1024 operations, and of its
 * last 8192 captured ones; of others a ticket is NOT_FOUND. The ticket of a captured operation stays valid:
 *     each wait (or hook) returns for a replay that none has returned for, with that of the last one, and
 *     epd_result_t::runs counts them. A result is there some microseconds after the stream has gone on.
 * epd_ticket_wait_on_stream waits for the slot's last operation in the stream's order (a MEMOP wait: the
 * slot's last operation of that kind).
 *   - An operation that fails, and all that follow it, are not carried out; streams go on. After a ticket or
 *     epd_group_check has said so, synchronise the streams and call epd_group_resume: what streams ask for
 *     before it has returned is not carried out either. Of what was not carried out op_index is a guess.
 *   - The deadline counts from when the kernel has begun the operation.
 *   - seen_us and launched_us of a result are 0, done_us is the time on the device. */

typedef struct epd_dispatch_args {
  size_t size;
  uint32_t slot;       /* 0..depth-1 */
  uint32_t num_tokens; /* n; with a handle: 0, or the n of its dispatch */
  epd_handle_t handle; /* 0: a new routing from topk_idx. Else the routing of that dispatch again (topk_idx is
                          not read, nothing is counted); the rows lie as they did then */
  const uint32_t* num_tokens_at; /* calls in a stream: n is read there, in device memory, in place of
                                    num_tokens, which is 0 then. NULL: num_tokens */
  uint32_t omit_weights;         /* 1: topk_weights are not sent along */
  uint32_t keep_handle; /* 1: *handle stays valid until epd_handle_release, one of the group's num_handles */
  uint32_t defer_receive; /* 1: epd_ticket_wait_sent tells when the inputs have been read */
  uint32_t zero_padding;  /* 1: packed: rows that align experts are zeroed (they are always marked, see
                             mark_unused); other layouts have none */
  uint32_t mark_unused; /* 1: all rows that no token fills, up to the room there is, are marked: recv_topk_idx
                           -1, weight 0, recv_src -1; so that nobody needs to know M */
  uint32_t sms;         /* of the device, for this operation; 0: the group's */
  int32_t timeout_ms;   /* the operation's deadline; 0: the daemon's default */
  uint32_t reserved;    /* 0 */
} epd_dispatch_args_t;
static inline void epd_dispatch_args_init(epd_dispatch_args_t* args) {
  memset(args, 0, sizeof(*args));
  args->size = sizeof(*args);
}

/* Reads x, x_scales, topk_idx, topk_weights of the slot; delivers the recv_* regions. *handle (may be NULL
 * unless keep_handle) names the routing for combine, and for dispatches that use it again, on any slot. It is
 * valid as soon as this returns, and, unless kept, until the next dispatch on the slot that makes a new
 * routing and does not keep it. Under a handle every rank must use the same dispatch's; *handle then is the
 * same. A dispatch that fails, or that epd_group_resume says is to be done again, leaves no handle: doing it
 * again gives a new one. NOT_FOUND: the handle is stale. RESOURCE_EXHAUSTED: no handle left to keep. */
EPD_API epd_status_t epd_dispatch(epd_group_t* group, const epd_dispatch_args_t* args, void* stream,
                                  epd_ticket_t* ticket, epd_handle_t* handle);

/* Gives a kept handle back. WOULD_BLOCK: an operation in flight uses it; of replays of a graph that captured
 * it nobody knows, so synchronise their stream first. NOT_FOUND: not a kept handle, or one that is no more
 * because its dispatch failed or is to be done again. When the session has ended: the status
 * with which it did, as DAEMON_LOST. */
EPD_API epd_status_t epd_handle_release(epd_group_t* group, epd_handle_t handle);

typedef struct epd_combine_args {
  size_t size;
  epd_handle_t handle;
  uint32_t slot;           /* whose y, topk_weights and biases are read, and whose out is written */
  uint32_t weighted;       /* 1: topk_weights of the slot weigh the rows, see below */
  uint32_t num_biases;     /* how many bias regions are added, 0..the group's */
  uint32_t return_weights; /* 1: y_weights come back as out_weights */
  uint32_t defer_receive;  /* 1: epd_ticket_wait_sent tells when the inputs have been read */
  uint32_t sms;            /* of the device, for this operation; 0: the group's */
  int32_t timeout_ms;      /* the operation's deadline; 0: the daemon's default */
  uint32_t reserved;       /* 0 */
} epd_combine_args_t;
static inline void epd_combine_args_init(epd_combine_args_t* args) {
  memset(args, 0, sizeof(*args));
  args->size = sizeof(*args);
}

/* Reads y of the slot, laid out as the dispatch delivered its rows, and delivers for each token t of it
 *   out[t] = bias[0][t] + bias[1][t] + sum over ranks d, ascending, of P_d
 * in float32 from +0.0 in this order, rounded once to bf16 (to nearest, ties to even).
 * Compact: row i of y answers received row i and is already the sum over this rank's experts; P_d = y_d, or
 * weighted W_d * y_d (one fused multiply-add), W_d = sum in order of k of the weights of the selections of t
 * that live on d. Packed, expert: y has a row per (token, expert); P_d = sum of the token's rows on d in
 * order of k, weighted by fused multiply-adds if asked, in float32, rounded to bf16 as it crosses the wire.
 * A token with no selection gives its biases, or zeros. With return_weights, out_weights[t,k] is the
 * y_weights value of the row that carried selection k (compact: its column k), 0 without one. NOT_FOUND: the
 * handle is stale.
 *
 * Training: dispatch's backward is combine (the gradients of recv_x in y, those of recv_topk_weights in
 * y_weights) with the same handle, combine's backward is dispatch (the gradient of out in x) under that
 * handle. */
EPD_API epd_status_t epd_combine(epd_group_t* group, const epd_combine_args_t* args, void* stream,
                                 epd_ticket_t* ticket);

/* Does nothing, to the engine and back; not collective. Measures the hand-off. Its deadline is the group's
 * default. In a stream it is in the order of the group's other operations, and fails with those that it comes
 * after if the group breaks. */
EPD_API epd_status_t epd_noop(epd_group_t* group, uint32_t slot, void* stream, epd_ticket_t* ticket);

/* ---- completion ---------------------------------------------------------------------------- */

typedef struct epd_result {
  size_t size;
  epd_status_t status;    /* of the operation */
  int32_t failed_rank;    /* the rank that the status is about, or -1 */
  uint64_t op_index;      /* the operation's number in its group */
  uint32_t num_recv_rows; /* M, after dispatch */
  uint32_t seen_us;       /* after submission: the engine took it */
  uint32_t launched_us;   /* the device began it */
  uint32_t done_us;
  /* EPD_POLICY_DEGRADE: selections of this rank's tokens that count as none because their expert's rank is
   * lost */
  uint32_t num_dropped_selections;
  uint32_t runs; /* 1; of a captured operation: how often it has ended */
} epd_result_t;
static inline void epd_result_init(epd_result_t* result) {
  memset(result, 0, sizeof(*result));
  result->size = sizeof(*result);
}

/* Returns the operation's status once it has ended; the ticket is then retired and another call
 * gives NOT_FOUND. timeout_ms 0: EPD_FOREVER. WOULD_BLOCK (EPD_NO_WAIT) or DEADLINE_EXCEEDED with
 * epd_ticket_pending() true: still in flight, the ticket stays valid. result may be NULL. */
EPD_API epd_status_t epd_ticket_wait(epd_group_t* group, epd_ticket_t ticket, int32_t timeout_ms,
                                     epd_result_t* result);
/* epd_ticket_wait with EPD_NO_WAIT. */
EPD_API epd_status_t epd_ticket_poll(epd_group_t* group, epd_ticket_t ticket, epd_result_t* result);
/* 1 while the operation is in flight. */
EPD_API int epd_ticket_pending(epd_group_t* group, epd_ticket_t ticket);

typedef struct epd_counts {
  size_t size;
  uint32_t num_recv_rows;        /* M; packed: with padding */
  const int32_t* rank_offsets;   /* [R+1] */
  const int32_t* expert_counts;  /* [E/R] */
  const int32_t* expert_offsets; /* [E/R+1]; NULL if compact */
} epd_counts_t;
static inline void epd_counts_init(epd_counts_t* counts) {
  memset(counts, 0, sizeof(*counts));
  counts->size = sizeof(*counts);
}

/* The counts of a dispatch, known before its rows have all arrived. The arrays live in memory shared with
 * the engine and stay as they are until the next operation on the slot. timeout_ms 0: EPD_FOREVER.
 * WOULD_BLOCK or DEADLINE_EXCEEDED: not yet; the operation's own status if it failed first. Does not retire
 * the ticket. */
EPD_API epd_status_t epd_ticket_counts(epd_group_t* group, epd_ticket_t ticket, int32_t timeout_ms,
                                       epd_counts_t* counts);

/* For an operation submitted with defer_receive: waits until its inputs on this rank have been read and may
 * be written again (dispatch: this rank's rows have been sent; combine: every rank has pulled what it needs,
 * on host devices that is the end). epd_ticket_wait then waits for the arrival: it is the receive hook. The
 * ticket stays valid. timeout_ms 0: EPD_FOREVER. WOULD_BLOCK or DEADLINE_EXCEEDED: not yet; the operation's
 * own status if it failed; INVALID_ARGUMENT: not submitted with defer_receive. */
EPD_API epd_status_t epd_ticket_wait_sent(epd_group_t* group, epd_ticket_t ticket, int32_t timeout_ms);

/* What is enqueued in the stream from here on begins when the operation has ended. For tickets of operations
 * that were submitted in a stream, as long as they are not retired: after defer_receive it is the receive
 * hook; and it makes further streams wait, any number of times, also when the operation has ended. Returns at
 * once. NOT_FOUND: retired, or not of this group; INVALID_ARGUMENT: EPD_NO_STREAM, here or at the submission;
 * INTERNAL: the driver's error. */
EPD_API epd_status_t epd_ticket_wait_on_stream(epd_group_t* group, epd_ticket_t ticket, void* stream);

/* The result is not wanted: the ticket is retired, and the operation goes on. NOT_FOUND: retired already. */
EPD_API epd_status_t epd_ticket_drop(epd_group_t* group, epd_ticket_t ticket);

/* Calls hook(result, user) once, on a thread of the library, when the operation has ended; also if it
 * has already. The ticket is retired by it: do not wait for it as well. */
typedef void (*epd_hook_t)(const epd_result_t* result, void* user);
EPD_API epd_status_t epd_ticket_on_complete(epd_group_t* group, epd_ticket_t ticket, epd_hook_t hook,
                                            void* user);

#ifdef __cplusplus
}
#endif

#endif /* EPD_EPD_H_ */
