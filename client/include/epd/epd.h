/* libepd: the client library of epd, the expert-parallel communication daemon.
 *
 * A process attaches to the daemon (a session on one device), joins a group as one rank, and submits
 * operations. A dispatch sends each token's row to the ranks of the experts that the token has selected. A
 * combine brings the experts' rows back and adds them up. client/GUIDE.md has the steps with examples, and
 * the contracts of streams, CUDA graphs, failures and training. This header states each call: arguments,
 * shapes, units and errors. proto/GLOSSARY.md has the words. kernels/SPECIFICATION.md defines results to the
 * bit.
 *
 * Conventions
 * 1. Status. Every call that can fail returns an epd_status_t. EPD_OK is 0. After a failure epd_last_error()
 *    holds a sentence for the calling thread: the value that was wrong, and the values that are allowed.
 * 2. Errors of every call, not repeated below: INVALID_ARGUMENT (a pointer is NULL that must not be, a
 *    struct's size is wrong, or the handle may not be used); RESOURCE_EXHAUSTED (out of memory); INTERNAL (an
 *    error of the operating system or the driver, or a defect of epd).
 * 3. End of a session. When the daemon stops or dies, submissions, waits and checks return DAEMON_LOST. When
 *    the daemon ends one session, they return its reason. Calls that only read keep working, and leave and
 *    detach return OK.
 * 4. Handles are opaque. Detach ends what attach made, and leave ends what join made. Detach also leaves all
 *    groups of the session. A call on a handle that has ended returns INVALID_ARGUMENT.
 * 5. Structs begin with `size`. epd_<struct>_init sets it and makes everything else zero. Zero is the default
 *    of every field that has one. A newer library takes missing fields as zero. An older library refuses
 *    fields that it does not know, unless they are zero.
 * 6. Threads. Any thread may make any call, also on one session at the same time, with two exceptions. Two
 *    threads that submit to one group must agree on an order. Leave and detach must not race with other calls
 *    on the same handle. No call waits for another call.
 * 7. Blocking. Only calls with a timeout block, and leave, detach and epd_group_check. Leave and detach wait
 *    for the hooks of what they end, and up to 5 seconds for the daemon. An operation whose memory the
 *    engines map waits for that: some milliseconds, or while an engine is stopped up to 5 seconds for each of
 *    its two memories.
 * 8. timeout_ms is 1 or more milliseconds, or 0 for the default that each call states. Calls whose default is
 *    EPD_FOREVER also take EPD_FOREVER and EPD_NO_WAIT. Other values are refused. A wait for an operation
 *    with EPD_FOREVER ends too, as the daemon gives every operation a deadline. If this device's engine is
 *    stopped (SIGSTOP, a debugger), or the group spans nodes and the coordinator is away, the wait ends with
 *    DEADLINE_EXCEEDED 5 seconds after that deadline, and the ticket stays valid.
 * 9. Hooks run on a thread of the library, never inside a call of yours. A hook may make any call but detach
 *    and leave.
 * 10. fork(). In a child, calls on inherited handles return INVALID_ARGUMENT and change nothing. A child may
 *    attach a session of its own.
 *
 * Shapes are row-major. R ranks, E experts, T = max_tokens, H = hidden, K = topk. n = tokens of this rank in
 * one dispatch (0 <= n <= T), M = rows that this rank receives. Expert e lives on rank e / (E/R).
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
  EPD_WOULD_BLOCK = 1,        /* no room now, or not finished: try again later */
  EPD_INVALID_ARGUMENT = 2,   /* the caller's mistake; also: ranks submitted different operations */
  EPD_NOT_FOUND = 3,          /* no such device, ticket or routing */
  EPD_PERMISSION_DENIED = 4,  /* this user may not */
  EPD_RESOURCE_EXHAUSTED = 5, /* a quota or limit, which the text names, or memory */
  EPD_UNSUPPORTED = 6,        /* not on this device or in this process */
  EPD_VERSION_MISMATCH = 7,   /* library and daemon do not fit */
  EPD_DEADLINE_EXCEEDED = 8,  /* of the operation, or only of this wait */
  EPD_RANK_LOST = 9,          /* a peer left or died; what then, the group's policy says */
  EPD_ENGINE_RESTARTED = 10,  /* the device's engine died and is back: epd_group_resume, then repeat */
  EPD_DAEMON_LOST = 11,       /* the daemon is gone: detach, then attach again */
  EPD_ABORTED = 12,           /* given up, for example because this rank has left */
  EPD_INTERNAL = 13           /* an error of the system or driver, or a defect of epd */
} epd_status_t;
/* 1: a submission, or an operation, that failed with this status is to be repeated after epd_group_advance or
 * epd_group_resume: RANK_LOST, DEADLINE_EXCEEDED, ENGINE_RESTARTED, ABORTED. 0: another status. */
static inline int epd_is_break(epd_status_t status) {
  return status == EPD_RANK_LOST || status == EPD_DEADLINE_EXCEEDED || status == EPD_ENGINE_RESTARTED ||
         status == EPD_ABORTED;
}

/* Values of timeout_ms, see convention 8. */
#define EPD_FOREVER (-1)
#define EPD_NO_WAIT (-2)
/* In place of a cudaStream_t: no stream. NULL is a stream, CUDA's legacy default stream. */
#define EPD_NO_STREAM ((void*)(intptr_t)-1)

typedef struct epd_session epd_session_t; /* one attachment to one device */
typedef struct epd_group epd_group_t;     /* one rank's membership in a group */
typedef uint64_t epd_ticket_t;            /* one operation in flight; 0 is never a ticket */
typedef uint64_t epd_handle_t;            /* the routing that one dispatch established; never 0 */

/* The library's version, "0.1.0". Never fails. */
EPD_API const char* epd_version(void);
/* "RANK_LOST" and so on. Never NULL. */
EPD_API const char* epd_status_name(epd_status_t status);
/* The text of this thread's last call that failed, "" before the first. Valid until the next one fails. */
EPD_API const char* epd_last_error(void);

/* ---- sessions ------------------------------------------------------------------------------ */

/* How the streams of a session wait for operations. client/GUIDE.md, "Streams and waits", compares them. */
typedef enum epd_wait_by {
  EPD_WAIT_BY_MEMOP = 0, /* MEMOP wait: a stream memory operation. It uses no SM */
  /* KERNEL wait: a kernel of one thread. It has less latency. Groups of which another rank is on the same GPU
   * have MEMOP waits all the same, because a waiting kernel may hold the GPU that the other rank needs */
  EPD_WAIT_BY_KERNEL = 1,
  /* MEMOP wait, and a CUDA event for each operation that a stream waits for: epd_ticket_event */
  EPD_WAIT_BY_EVENT = 2
} epd_wait_by_t;

typedef struct epd_attach_options {
  size_t size;
  /* Several paths with colons between them: if no daemon listens at one, or it has another version, drains or
   * does not answer in its share of the time, the next is tried. NULL: $EPD_SOCKET, else /run/epd/epd.sock */
  const char* socket_path;
  const char* device;    /* "host:0", "cuda:1", or a GPU's UUID, "GPU-..."; NULL: the least used device, among
                          * GPUs one that this process sees */
  int32_t timeout_ms;    /* for the whole handshake; 0: 5000 */
  epd_wait_by_t wait_by; /* 0: $EPD_WAIT_BY ("memop", "kernel" or "event") if it is set, else MEMOP */
} epd_attach_options_t;
static inline void epd_attach_options_init(epd_attach_options_t* options) {
  memset(options, 0, sizeof(*options));
  options->size = sizeof(*options);
}

typedef enum epd_device_kind { EPD_DEVICE_KIND_HOST = 0, EPD_DEVICE_KIND_CUDA = 1 } epd_device_kind_t;

typedef struct epd_session_info_s {
  size_t size;
  uint64_t session_id; /* as epctl shows it */
  char device[32];
  char daemon[64];  /* name and version of the daemon */
  char boot_id[33]; /* hexadecimal; each run of the daemon has another one */
  epd_device_kind_t device_kind;
} epd_session_info_t;
static inline void epd_session_info_init(epd_session_info_t* info) {
  memset(info, 0, sizeof(*info));
  info->size = sizeof(*info);
}

/* Connects to a daemon and takes a device of it. options may be NULL.
 *
 * On a CUDA device the session lives in the calling thread's current context if that is on the device, else
 * in the device's primary context, which the CUDA runtime uses. The context must outlive the session. The
 * daemon and this process may number devices differently: they are matched by UUID. Attach loads kernels, so
 * attach before streams of the context wait for operations of other sessions.
 *
 * DAEMON_LOST: no daemon listens there. NOT_FOUND: no such device. PERMISSION_DENIED: this user may not
 * connect. VERSION_MISMATCH: the text names both versions. RESOURCE_EXHAUSTED: a quota of sessions.
 * ABORTED: the daemon drains. DEADLINE_EXCEEDED: no answer within timeout_ms. WOULD_BLOCK: MPS recovers from
 * a fault on the GPU; try again. INVALID_ARGUMENT: a value of the options, or a GPU that this process does
 * not see. UNSUPPORTED: a CUDA device, and this process has no driver, or a KERNEL wait and the library's
 * kernels can't be loaded. */
EPD_API epd_status_t epd_session_attach(const epd_attach_options_t* options, epd_session_t** session);
/* Leaves all groups and ends the session. Operations in flight end; their rows may or may not have moved.
 * NULL is allowed. OK whatever the daemon does. INVALID_ARGUMENT, and nothing has been done: the handle has
 * ended, or the caller is a hook or a forked child. */
EPD_API epd_status_t epd_session_detach(epd_session_t* session);
/* The daemon's answer to the attach. No errors but those of convention 2, also after the session's end. */
EPD_API epd_status_t epd_session_info(const epd_session_t* session, epd_session_info_t* info);
/* OK while the daemon serves this session. Else the status with which it has ended, see convention 3. */
EPD_API epd_status_t epd_session_check(const epd_session_t* session);

/* ---- groups -------------------------------------------------------------------------------- */

/* The contents of a row of x and recv_x. Rows of y and out are always H bf16. */
typedef enum epd_payload {
  EPD_PAYLOAD_BF16 = 0,     /* the caller writes H bf16, receivers get the same */
  EPD_PAYLOAD_FP8_CAST = 1, /* writes H bf16; get H e4m3 with one scale (amax/448) for each 1x128 block */
  EPD_PAYLOAD_FP8 = 2,      /* writes H e4m3 and scales; get the same */
  EPD_PAYLOAD_OPAQUE = 3    /* writes opaque_bytes; get the same */
} epd_payload_t;

/* The scales of an e4m3 row. */
typedef enum epd_scale_format {
  EPD_SCALE_FORMAT_FLOAT32 = 0,      /* float32 [S], S = ceil(H/128) */
  EPD_SCALE_FORMAT_FLOAT32_POW2 = 1, /* the same, rounded up to a power of two; FP8_CAST only */
  EPD_SCALE_FORMAT_UE8M0 = 2         /* int32 [ceil(H/512)]: 4 powers of two 2^e, each as a byte e + 127 */
} epd_scale_format_t;

/* A row format: what the rows of a dispatch are. */
typedef struct epd_row_format {
  epd_payload_t payload;
  epd_scale_format_t scale_format;
} epd_row_format_t;

/* The most row formats of a group beyond its first. */
#define EPD_MAX_MORE_FORMATS 3

/* Where the scales of received rows lie, in recv_scales. */
typedef enum epd_scale_layout {
  EPD_SCALE_LAYOUT_ROW_MAJOR = 0, /* with their row: [rows,S], S float32 or int32 by scale format */
  /* Scale by scale, as TMA and DeepGEMM read them: [S,P]. P is [rows] rounded up to a multiple of 4: 16
   * bytes. Layout expert: [E/R,S,P], where P comes from the rows of an expert's block. The last P - [rows] of
   * each S are never written */
  EPD_SCALE_LAYOUT_COLUMN_MAJOR = 1
} epd_scale_layout_t;

/* How received rows lie. Places follow from counts, never from the time of arrival. */
typedef enum epd_layout {
  /* One row for each (token, rank), by source rank, then token. For prefill and training. */
  EPD_LAYOUT_COMPACT = 0,
  /* One row for each (token, local expert), by expert, then source rank, then token. The first row of each
   * expert is a multiple of expert_alignment. For contiguous grouped GEMM. */
  EPD_LAYOUT_PACKED = 1,
  /* The same rows, each expert in a block of its own. For masked grouped GEMM, decode. */
  EPD_LAYOUT_EXPERT = 2
} epd_layout_t;

/* The form of an entry of source_ranges, for each (local expert, source rank). */
typedef enum epd_range_format {
  EPD_RANGE_FORMAT_ROWS = 0, /* int32 [2]: first row in recv_x, number of rows */
  /* int64: first row << 32 | number of rows, where the first row counts from the expert's own first row. As
   * DeepEP's layout_range */
  EPD_RANGE_FORMAT_PACKED64 = 1
} epd_range_format_t;

/* The element type of topk_idx and recv_topk_idx. */
typedef enum epd_index_type { EPD_INDEX_TYPE_INT32 = 0, EPD_INDEX_TYPE_INT64 = 1 } epd_index_type_t;

/* The effect of a lost rank on the group. A rank is lost when it dies, leaves, or an operator evicts it.
 * client/GUIDE.md, "When something fails", has the whole contract. */
typedef enum epd_policy {
  EPD_POLICY_FAIL_FAST = 0, /* the group ends: RANK_LOST on all other ranks */
  /* The operations in flight end with RANK_LOST. After epd_group_resume the others go on without the rank:
   * selections of its experts count as none. A new process may join in its place; then the operations in
   * flight end with ABORTED, and after epd_group_resume all go on with it. A rank that lives and is silent is
   * not lost: each operation waits for it until its deadline, 30 s by default, and fails. */
  EPD_POLICY_DEGRADE = 1,
  /* As EPD_POLICY_DEGRADE, and a silent rank costs one deadline only: a rank is also lost if an operation has
   * waited for it until its deadline: one rank for each such operation. The rank's own calls return
   * RANK_LOST, with its own rank. */
  EPD_POLICY_DEGRADE_LATE = 2
} epd_policy_t;

/* Where the ranks of a group may be. */
typedef enum epd_span {
  EPD_SPAN_NODE = 0,   /* on one node: the daemon's own group, whatever has the same name elsewhere */
  EPD_SPAN_CLUSTER = 1 /* on any node of the daemon's cluster. Host devices only */
} epd_span_t;

/* The regions of a buffer slot. epd_buffers_t says what each holds. */
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

/* On a GPU, rows in memory that the engines have mapped are not copied: x, recv_x, y and out of
 * epd_memory_t, if they lie there on a multiple of 16 bytes, and behind where recv_x and y begin there is
 * room in the allocation for the group's region (epd_region_bytes; for recv_rows rows of y in layout compact,
 * if given). Peers store to recv_x and load from y by
 * themselves. All else that epd_memory_t names is copied. libepd has an allocation mapped that three calls of
 * the group have named, or that a captured call names. That is memory of cudaMalloc, and memory of
 * cuMemCreate that can be exported, also in up to 20 adjacent allocations of one size. Memory that has been
 * freed is never used, also if the same address is allocated again. Memory that a captured call names must
 * outlive the graph: if it does not, the next call that is not captured, or epd_group_check, says
 * INVALID_ARGUMENT, and the graph's calls fail with NOT_FOUND from then on.
 *
 * This maps a range now, for all groups of the session and those that it joins later. Then rows must lie in
 * the range. It is within such memory. A group has 64 memories mapped at most, which calls beyond that
 * copy. UNSUPPORTED: the device's operations take rows from their slots alone (host devices); calls then
 * copy. INVALID_ARGUMENT: such a range can't be registered. RESOURCE_EXHAUSTED: 64 are, or it can't be
 * mapped for the moment. */
EPD_API epd_status_t epd_memory_register(epd_session_t* session, void* address, size_t bytes);
/* From here on calls copy rows of the allocation, but for other ranges of it that are registered. Calls that
 * are enqueued, and graphs, still name it. Freeing memory does the same. NOT_FOUND: no range begins there. */
EPD_API epd_status_t epd_memory_unregister(epd_session_t* session, void* address);

#define EPD_ANY_RANK (-1)

/* All ranks must give the same values, but for rank, timeout_ms, sms and priority. */
typedef struct epd_group_config {
  size_t size;
  /* [fields.py: epd_group_config_t] */
  /* 1..63 characters of [A-Za-z0-9._-] */
  const char* name;
  /* 0..num_ranks-1, or EPD_ANY_RANK: any free one */
  int32_t rank;
  /* R, 1..1024 */
  uint32_t num_ranks;
  /* E: a multiple of R, at most 4096. Expert e lives on rank e / (E/R) */
  uint32_t num_experts;
  /* T, 1..65536: the most tokens of a dispatch. Sizes of buffers follow from it */
  uint32_t max_tokens;
  /* H: a multiple of 8, at most 16384 */
  uint32_t hidden;
  /* K, 1..32 */
  uint32_t topk;
  /* buffer slots, 1..16; 0: 4 */
  uint32_t depth;
  /* with scale_format: row format 0 */
  epd_payload_t payload;
  /* of topk_idx and recv_topk_idx */
  epd_index_type_t index_type;
  /* what becomes of the group when a rank is lost */
  epd_policy_t policy;
  /* SMs (host devices: threads) of the device to use; 0: the device's default */
  uint32_t sms;
  /* of the join; 0: the daemon's timeouts.join_ms, 60 s if not configured */
  int32_t timeout_ms;
  /* how received rows lie */
  epd_layout_t layout;
  /* of e4m3 rows */
  epd_scale_format_t scale_format;
  /* rows, 1..256; 0: 1. EPD_LAYOUT_PACKED: each expert's first row is a multiple of it. EPD_LAYOUT_COMPACT:
   * expert_counts are rounded up to it */
  uint32_t expert_alignment;
  /* of a row: a multiple of 16, 16..65536; EPD_PAYLOAD_OPAQUE only */
  uint32_t opaque_bytes;
  /* bias regions that combine may add, 0..2 */
  uint32_t num_biases;
  /* handles that dispatches may keep, 0..4096 */
  uint32_t num_handles;
  /* rows of recv_x and y (EPD_LAYOUT_EXPERT: of each expert's block); 0: the worst case. A dispatch that
   * needs more fails with RESOURCE_EXHAUSTED on all ranks; with EPD_SPAN_CLUSTER on those of the node, and
   * ranks of other nodes may be taken back to it by the resume */
  uint32_t max_recv_rows;
  /* of this rank's operations on its device, -8..7; higher goes first */
  int32_t priority;
  /* ranks of a sum domain, 1..R; 0: the daemon's choice, R for a group on one node. Combine adds up the rows
   * of each sum domain, and rounds the sums of other domains than its own to bf16. CUDA devices take 0 and R.
   * Since 0.2.0 */
  uint32_t sum_ranks;
  /* where ranks may be. EPD_SPAN_CLUSTER: on any node of the cluster, host devices only. Since 0.2.0 */
  epd_span_t span;
  /* of received rows; EPD_PAYLOAD_FP8_CAST and EPD_PAYLOAD_FP8. Since 0.2.0 */
  epd_scale_layout_t scale_layout;
  /* of source_ranges; EPD_LAYOUT_PACKED and EPD_LAYOUT_EXPERT. Since 0.2.0 */
  epd_range_format_t range_format;
  /* row formats 1, 2, 3, which a dispatch may choose by row_format. All differ. Regions have room for the
   * largest. Not with EPD_PAYLOAD_OPAQUE. Since 0.2.0. Read during the call; NULL: none */
  const epd_row_format_t* more_formats;
  uint32_t num_more_formats;
  /* 1: in a slot, y lies where recv_x lies, and out where x does: about half the memory, for calls that name
   * these rows in memory of the caller's, or write y over recv_x. No operation of a slot may begin before
   * what the one before it has left there has been read. Since 0.2.0 */
  uint32_t shared_regions;
  /* [end] */
} epd_group_config_t;
static inline void epd_group_config_init(epd_group_config_t* config) {
  memset(config, 0, sizeof(*config));
  config->size = sizeof(*config);
}

/* Blocks until all R ranks have joined. Several threads may join at once, other groups or other ranks.
 *
 * INVALID_ARGUMENT: the text names the field. Also: the rank is taken; another rank has given another value
 * (the text has both). RESOURCE_EXHAUSTED: a quota or limit, or 64 joins of this session wait already.
 * PERMISSION_DENIED: this user may not join the group. UNSUPPORTED: the device can't serve such a group, or
 * there is no cluster for EPD_SPAN_CLUSTER. DEADLINE_EXCEEDED: the text names the ranks that are missing, or
 * says that the group has not agreed to take this rank back, or that the daemon did not answer within 5
 * seconds more. If the daemon accepts such a join later, the library leaves again. */
EPD_API epd_status_t epd_group_join(epd_session_t* session, const epd_group_config_t* config,
                                    epd_group_t** group);
/* *bytes: of the region in one slot of such a group; 0: the group would have no such region. Needs no
 * session. name and rank are ignored. INVALID_ARGUMENT: the shape, or the region. */
EPD_API epd_status_t epd_region_bytes(const epd_group_config_t* config, epd_region_t region, uint64_t* bytes);

/* Bytes of memory that the daemon allocates for a group. On a CUDA device both arenas are on the GPU, and the
 * driver rounds each up to an allocation unit, 2 MiB as a rule. On a host device a page counts when it is
 * first touched. */
typedef struct epd_group_bytes_s {
  size_t size;
  uint64_t user_arena;      /* of a rank: all regions of all slots */
  uint64_t exchange_arena;  /* of a rank: what ranks write to each other, and the next two fields */
  uint64_t routing_records; /* in exchange_arena: depth + num_handles records */
  uint64_t inboxes;         /* in exchange_arena: rows of operations with few tokens; 0: there are none */
  uint64_t board;           /* of a rank: its state for the client, in host memory */
  uint64_t results;         /* of a rank: results of its operations, in host memory */
  uint64_t rank;            /* user_arena + exchange_arena + board + results: counts against
                               limits.max_arena_bytes_per_user */
  uint64_t group;           /* num_ranks * rank */
  uint64_t routing_quota; /* of a rank, counts against limits.max_routing_bytes_per_user: what a host device's
                             engine keeps of routings at the most; 0 on a CUDA device */
} epd_group_bytes_t;
static inline void epd_group_bytes_init(epd_group_bytes_t* bytes) {
  memset(bytes, 0, sizeof(*bytes));
  bytes->size = sizeof(*bytes);
}

/* The memory of such a group on devices of the kind. Needs no session. name and rank are ignored.
 * INVALID_ARGUMENT: the shape, or the kind. */
EPD_API epd_status_t epd_group_bytes(const epd_group_config_t* config, epd_device_kind_t kind,
                                     epd_group_bytes_t* bytes);

/* Leaves the group and frees the handle. NULL is allowed. Operations of peers that need nothing more of this
 * rank still complete; others, and later ones, end with RANK_LOST. With EPD_POLICY_DEGRADE all in flight do.
 * This rank's own operations in flight end with ABORTED. On a CUDA device leave waits, like cudaFree, for all
 * work in the session's context, because the regions are unmapped. OK whatever the daemon does.
 * INVALID_ARGUMENT, and nothing has been done: the handle has ended, or the caller is a hook or a forked
 * child. */
EPD_API epd_status_t epd_group_leave(epd_group_t* group);
/* This rank's number. UINT32_MAX if the handle may not be used. */
EPD_API uint32_t epd_group_rank(const epd_group_t* group);
/* 1 while the rank takes part in operations. 0: it is lost (EPD_POLICY_DEGRADE), is no rank of the group, or
 * the handle may not be used. */
EPD_API int epd_group_active(const epd_group_t* group, uint32_t rank);
/* *mask: int32 [R] in the group's memory, on a CUDA device a device address, which kernels may read. 1: the
 * rank takes part in operations, as far as this rank knows: it is set by the join and by each
 * epd_group_resume that returns OK, before it returns. epd_group_active may know more. libepd alone writes
 * it. Valid until epd_group_leave, and always the same address. */
EPD_API epd_status_t epd_group_active_mask(const epd_group_t* group, const int32_t** mask);
/* For how long each rank has held up this rank's device since the join, in nanoseconds. Each array is [R], or
 * NULL: not wanted. The times only grow: take differences. Other ranks are waited for at the same time, so
 * the times of one operation add up to more than it took. ready_ns    from when this rank had begun an
 * operation until that rank had arrived_ns  from when this rank was done with all others until that rank was
 * done with this one: of a dispatch, until its rows were here On a host device each is exact. On a CUDA
 * device it is sampled: a time counts that lies between two looks of the engine which both find the same
 * operation waiting. It looks about every 50 ms. So the waits of most operations are not seen, and those for
 * a rank that is late by 100 ms or more are. */
EPD_API epd_status_t epd_group_waits(const epd_group_t* group, int64_t* ready_ns, int64_t* arrived_ns);
/* Ranks of a sum domain: epd_group_config_t::sum_ranks, or the daemon's choice. The same on all ranks, for
 * the group's whole life. 0 if the handle may not be used. */
EPD_API uint32_t epd_group_sum_ranks(const epd_group_t* group);

/* The regions of one buffer slot: memory that this process shares with the engine, so nothing is copied
 * between them. On a CUDA device these are device addresses.
 *
 * An input may be written until its operation is submitted, and again when that has completed (with
 * defer_receive: when epd_ticket_wait_sent has returned). An output is valid from completion until the next
 * operation is submitted on the slot; in a stream, until the next operation begins.
 *
 * row = H bf16, H e4m3 or opaque_bytes, by the payload of the dispatch's row format. Rows lie close together
 * whatever the format: in a group with several, what is behind the last row of a smaller one is not used.
 * [rows] = max_recv_rows, or the worst case: compact R*T; packed R*T*min(K, E/R) + E/R*(expert_alignment-1);
 * expert E/R blocks of R*T. C = K (compact) or 1. */
typedef struct epd_buffers {
  size_t size;
  /* in: written by the caller, read by an operation. out: the reverse */
  void* x;             /* in  [T] rows; FP8_CAST: H bf16. Read by dispatch */
  void* topk_idx;      /* in  [T,K] int32 or int64: the experts of each token; negative: none. Dispatch */
  float* topk_weights; /* in  [T,K]. Dispatch sends them along; a weighted combine multiplies by them */
  void* recv_x;        /* out [rows] of dispatch. Compact: the first M are valid. Packed, expert: those of
                          local expert e begin at expert_offsets[e] and are expert_counts[e] */
  void* recv_scales;   /* out [rows] in the scale format, by scale_layout; NULL if no row format is FP8 */
  void* recv_topk_idx; /* out [rows,C] of the index type: local expert numbers; -1: another rank's, or none */
  float* recv_topk_weights; /* out [rows,C]: their weights; 0 where there is none. Packed, expert: the sum of
                               the token's weights of the expert, in order of k */
  int32_t* recv_src;        /* out [rows,2]: source rank, and the token's number there */
  int32_t* rank_offsets;    /* out [R+1]: tokens from rank r are numbers [r] to [r+1] - 1 of those received;
                               compact: also its rows */
  int32_t* expert_counts;   /* out [E/R]: rows of each local expert; compact: selections of it */
  void* y;                  /* in  [rows,H] bf16: the experts' results, one row for each received row */
  void* out;                /* out [T,H] bf16 of combine */
  void* x_scales;           /* in  [T] in the scale format; NULL if no row format is EPD_PAYLOAD_FP8 */
  int32_t* expert_offsets;  /* out [E/R+1]: first row of each local expert; the last: end of the rows, packed
                               with padding. NULL if compact */
  int32_t* source_ranges;   /* out [E/R,R,2]: first row and number of rows of (local expert, source rank), or
                               int64 [E/R,R], by range_format. NULL if compact */
  float* y_weights;         /* in  [rows,C]: gradients of recv_topk_weights. Combine with return_weights */
  void* bias[2];            /* in  [T,H] bf16, added by combine; NULL from num_biases on */
  float* out_weights;       /* out [T,K] of combine with return_weights: gradients of topk_weights */
} epd_buffers_t;
static inline void epd_buffers_init(epd_buffers_t* buffers) {
  memset(buffers, 0, sizeof(*buffers));
  buffers->size = sizeof(*buffers);
}

/* The regions of slot 0..depth-1, the same at every call. INVALID_ARGUMENT: the slot. */
EPD_API epd_status_t epd_group_buffers(const epd_group_t* group, uint32_t slot, epd_buffers_t* buffers);

typedef struct epd_resume_info {
  size_t size;
  uint64_t epoch;            /* 1 at first; each resume after a break begins a new one */
  uint64_t resume_op;        /* the first operation that some rank has not completed: repeat from here */
  uint32_t num_active_ranks; /* below num_ranks: the others are lost (EPD_POLICY_DEGRADE) */
  uint32_t reserved;
} epd_resume_info_t;
static inline void epd_resume_info_init(epd_resume_info_t* info) {
  memset(info, 0, sizeof(*info));
  info->size = sizeof(*info);
}

/* Waits until the group has agreed on a new epoch, after an operation has failed for the whole group
 * (ENGINE_RESTARTED, DEADLINE_EXCEEDED, INVALID_ARGUMENT between ranks, RESOURCE_EXHAUSTED of a dispatch
 * with more rows than max_recv_rows; with EPD_POLICY_DEGRADE also RANK_LOST and ABORTED). Every rank calls
 * it, then submits again from resume_op on. Until it has returned OK, submissions return the failure's
 * status, and peers may write into recv regions of failed operations. A process that has taken a lost rank's
 * place calls it after its join, to learn where the group is. resume_op may be an operation that this rank
 * has completed: keep handle, number of tokens and inputs of operation i until operation i + depth has
 * completed here.
 *
 * timeout_ms 0: EPD_FOREVER. info may be NULL. OK at once if nothing is wrong. WOULD_BLOCK (EPD_NO_WAIT) or
 * DEADLINE_EXCEEDED: not agreed yet, as a stopped engine (SIGSTOP) delays it; or this device's engine has not
 * ended an operation whose deadline has passed. RANK_LOST: the group has ended, or
 * this rank was evicted; leave. ABORTED: another thread has left. INVALID_ARGUMENT: timeout_ms. */
EPD_API epd_status_t epd_group_resume(epd_group_t* group, int32_t timeout_ms, epd_resume_info_t* info);

/* Takes back ranks that were lost because they were late, and that live (EPD_POLICY_DEGRADE_LATE). The late
 * ranks and all that take part call it, with no operation in flight. It returns when all of them have called
 * and the group has a new epoch; then all go on at resume_op, which nobody has to repeat, with a dispatch
 * that makes a new routing. It returns at once if no rank is late. Ranks that are gone stay lost. On a rank
 * that was late tickets and handles have ended: NOT_FOUND. On a CUDA device its regions and its mask are
 * elsewhere (epd_group_buffers), and graphs are to be captured again. On such a rank the call must not race
 * with other calls on the group.
 *
 * timeout_ms: how long to wait for the calls of the others; 0: the daemon's timeouts.join_ms. When all have
 * called, it waits for the new epoch without end, a rank that was late for 10 minutes. A stopped engine
 * (SIGSTOP) delays it. info may be NULL. DEADLINE_EXCEEDED: the text names the ranks that have not called,
 * and nothing has changed. If it names none, the daemon has not answered, and a rank that was late stays
 * lost. The status of a break: the group has broken meanwhile; after epd_group_resume and what is to be
 * repeated, call again. WOULD_BLOCK: an operation is in flight. RANK_LOST: the group has ended, or this rank
 * was not lost for being late, or another process has taken it; leave. UNSUPPORTED: the group spans nodes.
 * INVALID_ARGUMENT: another policy, timeout_ms, or the caller is a hook. */
EPD_API epd_status_t epd_group_restore(epd_group_t* group, int32_t timeout_ms, epd_resume_info_t* info);

typedef struct epd_progress {
  size_t size;
  uint64_t next_op; /* all operations of the group below this number have completed on this rank */
  uint32_t ended;   /* operations that have ended since the join, modulo 2^32 */
  uint32_t failed;  /* of these, those that were not carried out */
} epd_progress_t;
static inline void epd_progress_init(epd_progress_t* progress) {
  memset(progress, 0, sizeof(*progress));
  progress->size = sizeof(*progress);
}

/* OK: the group can be used, and all operations that had ended before this call were carried out since the
 * last epd_group_resume. It does not wait for operations of streams: synchronise the stream first. progress
 * may be NULL, and is filled also on failure.
 *
 * Otherwise the status and text of the group's break. The call waits for them, up to 5 seconds and as long as
 * the engine is away; without a failure it takes some tens of microseconds on a GPU.
 * ABORTED: on a GPU the group is well, but operations were not carried out because they were enqueued before
 * epd_group_resume had returned. On a host device the group has not agreed on its break in this time. Or this
 * rank has left. */
EPD_API epd_status_t epd_group_check(epd_group_t* group, epd_progress_t* progress);

/* ---- memory of your own, call by call ---------------------------------------------------------- */

/* Memory of your own for one operation, in place of regions of its slot. Each field is named for its region,
 * has the shape and type that epd_buffers_t gives, and any address (of the four that follow recv_src: a
 * multiple of 4). NULL is the slot's region. One struct may serve a layer's dispatch and its combine: an
 * operation ignores the fields of the other. A field of a region that the group, or the row format, does not
 * have must be NULL. The struct may go when the submission returns.
 *
 * libepd copies between this memory and the regions, which such an operation overwrites: the n rows of a
 * token-wise input or output, the rows that were received, no others. An address that is the region's own is
 * not copied. Memory of one operation must not overlap, but for inputs with inputs.
 *
 * On a host device the submission copies inputs. Outputs are copied by the call that takes the operation's
 * end (wait, poll, or a hook, before it runs), or by the slot's next submission if that comes first.
 * epd_ticket_drop copies nothing. Afterwards libepd never touches the memory. An operation that fails writes
 * nothing to it.
 *
 * On a CUDA device the operation must be in a stream (UNSUPPORTED with EPD_NO_STREAM), and the session's
 * context must reach the memory. libepd's kernels copy in that stream, so the copies obey its order and may
 * be captured. With defer_receive outputs are copied where epd_ticket_wait_on_stream is called, once; further
 * streams wait for that one by an event (INVALID_ARGUMENT, unless the operation has its epd_ticket_event).
 * The outputs of an operation that fails hold anything.
 *
 * More rows than recv_rows: nothing of recv_x, recv_scales, recv_topk_idx, recv_topk_weights and recv_src is
 * written, counts and offsets are. On this rank alone the ticket ends with RESOURCE_EXHAUSTED and with M in
 * num_recv_rows. The dispatch has gone well: its handle is valid, and its rows lie in the slot's regions,
 * where epd_group_buffers finds them until the slot's next dispatch. Expert: nothing is written of the rows
 * of an expert that has more, as expert_counts says; the ticket ends well. */
typedef struct epd_memory {
  size_t size;
  /* dispatch, in */
  const void* x;
  const void* x_scales;
  const void* topk_idx;      /* not read under a handle */
  const float* topk_weights; /* also of a weighted combine */
  /* dispatch, out */
  void* recv_x;
  void* recv_scales; /* column-major: P comes from recv_rows, as far as the group has so many rows */
  void* recv_topk_idx;
  float* recv_topk_weights;
  int32_t* recv_src;
  int32_t* rank_offsets;   /* compact: combine reads it, to know the rows of y */
  int32_t* expert_counts;  /* expert: likewise */
  int32_t* expert_offsets; /* packed: likewise. Expert: rows of your memory, see recv_rows */
  int32_t* source_ranges;  /* expert: likewise rows of your memory. EPD_RANGE_FORMAT_PACKED64: int64 */
  /* combine, in */
  const void* y; /* its rows lie as dispatch delivers them, and are counted as rank_offsets, expert_offsets or
                    expert_counts say, by layout. If that is NULL: as the regions of a slot say whose last
                    dispatch had this routing. INVALID_ARGUMENT if there is none, or none since a failure */
  const float* y_weights;
  const void* bias[2]; /* the first num_biases of the operation */
  /* combine, out */
  void* out;
  float* out_weights;
  uint32_t recv_rows; /* rows for which there is room in the memory given for recv_* and y. Compact, packed: 0
                         or more than the group's [rows]: those. Expert: of each expert's block, and so the
                         distance from block to block; 0: the group's */
  uint32_t reserved;  /* 0 */
} epd_memory_t;
static inline void epd_memory_init(epd_memory_t* memory) {
  memset(memory, 0, sizeof(*memory));
  memory->size = sizeof(*memory);
}

/* ---- operations ----------------------------------------------------------------------------
 * All ranks submit the same operations of a group in the same order, on the same slots, under the same
 * handles, dispatches with the same row format. Everything else concerns this rank's own rows and may differ.
 * A submission returns at once, with a ticket; the operation's own failure comes from the ticket.
 *
 * stream: EPD_NO_STREAM, or on a CUDA device a cudaStream_t or CUstream of the session's context that lives
 * until its operations have ended. With EPD_NO_STREAM the operation begins at once, and its inputs must be
 * complete. In a stream it begins when the earlier work of the stream is done, and later work begins when it
 * has ended, well or not. client/GUIDE.md, "Streams and waits" and "CUDA graphs", has the contract.
 *
 * Errors of every submission. All but the last: nothing was submitted.
 *   WOULD_BLOCK         EPD_NO_STREAM: the slot has an operation in flight, or 64 operations of the rank have
 *                       not ended. A stream: 64 with defer_receive have not ended and no stream waits for
 *                       them. A combine with memory on a host device: the dispatch that counts its rows is
 *                       in flight. 1024 results belong to hooks
 *   INVALID_ARGUMENT    a value, which the text names; a stream on a host device
 *   UNSUPPORTED         a stream, and the library's kernels can't be loaded
 *   a break's status    the group needs epd_group_resume, or has ended (RANK_LOST)
 *   ABORTED             this rank has left
 *   INTERNAL            the driver's error. If *ticket was set, the operation was submitted, and the stream
 *                       does not wait for it */

typedef struct epd_dispatch_args {
  size_t size;
  uint32_t slot;       /* 0..depth-1 */
  uint32_t num_tokens; /* n, 0..T; under a handle: 0, or the n of its dispatch */
  epd_handle_t handle; /* 0: a new routing, from topk_idx. Else the routing of that dispatch: topk_idx is not
                          read, nothing is counted, and rows lie as they did then */
  const uint32_t* num_tokens_at; /* GPUs, in a stream: n is read from this device memory when the
                                    stream gets there, and num_tokens is 0. More than T ends the session.
                                    NULL: num_tokens. Under a handle only with memory */
  uint32_t omit_weights;         /* 1: topk_weights are not sent along */
  uint32_t keep_handle;   /* 1: *handle stays valid until epd_handle_release; takes one of num_handles. Not
                             under a handle */
  uint32_t defer_receive; /* 1: epd_ticket_wait_sent tells when the inputs may be written again, and a stream
                             waits only by epd_ticket_wait_on_stream */
  uint32_t zero_padding;  /* 1, packed: padding rows of recv_x are zeroed. They are always marked as by
                             mark_unused. Other layouts have no padding */
  uint32_t mark_unused;   /* 1: every row that no token fills gets recv_topk_idx -1, weight 0, recv_src -1 */
  uint32_t sms;           /* for this operation; 0: the group's */
  int32_t timeout_ms;     /* the operation's deadline; 0: the daemon's timeouts.operation_ms, 30 s if not
                             configured */
  uint32_t row_format;    /* 0: the group's payload and scale_format; i: its more_formats[i - 1]. The same on
                             all ranks. Under a handle it may differ from that of the handle's dispatch */
  const epd_memory_t* memory; /* in place of regions of the slot; NULL: the regions */
} epd_dispatch_args_t;
static inline void epd_dispatch_args_init(epd_dispatch_args_t* args) {
  memset(args, 0, sizeof(*args));
  args->size = sizeof(*args);
}

/* Sends rows: reads x, x_scales, topk_idx and topk_weights of the slot on each rank, and delivers the recv_*
 * regions, counts and offsets.
 *
 * *handle names the routing, for combine and for later dispatches on any slot. It may be NULL unless
 * keep_handle. It is valid when the call returns. It names a routing record: the slot's, whose routing the
 * next dispatch on the slot replaces unless it has a handle itself, or with keep_handle one of num_handles,
 * until epd_handle_release. So all dispatches on a slot return one handle. A dispatch under a handle returns
 * that handle. A kept handle whose dispatch fails or must be repeated stays taken until it is released; the
 * repeated dispatch takes another one.
 *
 * Errors beside those of every submission: NOT_FOUND (the handle was released, or never given),
 * RESOURCE_EXHAUSTED (keep_handle, and all of num_handles are kept). */
EPD_API epd_status_t epd_dispatch(epd_group_t* group, const epd_dispatch_args_t* args, void* stream,
                                  epd_ticket_t* ticket, epd_handle_t* handle);

/* Gives a kept handle back. NOT_FOUND: not a kept handle. WOULD_BLOCK: an operation in flight uses it. The
 * library does not know of replays of graphs: synchronise their stream first. */
EPD_API epd_status_t epd_handle_release(epd_group_t* group, epd_handle_t handle);

/* Which y_weights a combine returns, as out_weights [T,K]. */
typedef enum epd_return_weights {
  EPD_RETURN_WEIGHTS_NONE = 0, /* none: out_weights are not written */
  EPD_RETURN_WEIGHTS_OWN = 1,  /* each selection's: of the row that carried it (compact: column k of it) */
  /* Compact: column k, summed over all ranks that got the token, whether or not selection k was theirs. In
   * float32, in the order in which combine adds rows. Packed, expert: the same as OWN, as a row carries the
   * selections of one expert only */
  EPD_RETURN_WEIGHTS_SUM = 2
} epd_return_weights_t;

typedef struct epd_combine_args {
  size_t size;
  epd_handle_t handle; /* of the dispatch whose rows y answers. 0: of one from before this rank took a lost
                          rank's place; it takes part without tokens and rows then */
  uint32_t slot;       /* whose y, topk_weights and biases are read, and whose out is written */
  uint32_t weighted;   /* 1: rows are multiplied by topk_weights of the slot */
  uint32_t num_biases; /* how many bias regions are added, 0..the group's */
  epd_return_weights_t return_weights; /* which y_weights return to the tokens, as out_weights */
  uint32_t defer_receive;              /* as of dispatch */
  uint32_t sms;                        /* for this operation; 0: the group's */
  int32_t timeout_ms;                  /* as of dispatch */
  uint32_t num_tokens; /* with memory: the n of the handle's dispatch; 0: as that said. It must be given if
                          that had num_tokens_at, or the group has resumed since. A captured
                          combine keeps it */
  const epd_memory_t* memory;    /* in place of regions of the slot; NULL: the regions */
  const uint32_t* num_tokens_at; /* with memory: as of dispatch */
} epd_combine_args_t;
static inline void epd_combine_args_init(epd_combine_args_t* args) {
  memset(args, 0, sizeof(*args));
  args->size = sizeof(*args);
}

/* Brings rows back: reads y of the slot, whose rows lie as the dispatch delivered them, and writes for each
 * token t of the dispatch
 *   out[t] = bias[0][t] + bias[1][t] + sum over ranks d, ascending, of P_d
 * in float32 from +0.0 in this order, rounded once to bf16 (to nearest, ties to even). With several sum
 * domains (sum_ranks) the sum of each other domain is rounded to bf16 before it is added.
 *   Compact: row i of y answers received row i, and is the sum over this rank's experts. P_d = y_d, or
 *   weighted W_d * y_d by one fused multiply-add. W_d = sum, in order of k, of the weights of t's selections
 *   on d.
 *   Packed, expert: P_d = sum, in order of k, of t's rows on d, weighted by fused multiply-adds, in float32,
 *   then rounded to bf16 for the way back. In all layouts a row of weight 0 is left out, whatever it holds.
 * A token without a selection gets its biases, or zeros. With EPD_RETURN_WEIGHTS_OWN, out_weights[t,k] is
 * the y_weights of the row that carried selection k (compact: column k of it), and 0 where there was none.
 * EPD_RETURN_WEIGHTS_SUM and compact rows: it is the sum over ranks d, ascending, of column k of
 * y_weights of t's row on d, in float32 from +0.0; sums of other sum domains are made first, and are not
 * rounded.
 *
 * The backward pass of dispatch is a combine under its handle, and that of combine is a dispatch under the
 * handle (client/GUIDE.md, "Training"). Errors beside those of every submission: NOT_FOUND (the handle has
 * ended, or was never given). */
EPD_API epd_status_t epd_combine(epd_group_t* group, const epd_combine_args_t* args, void* stream,
                                 epd_ticket_t* ticket);

/* Goes to the engine and back, and moves nothing. Not collective: no other rank takes part. It measures the
 * hand-off. Its deadline is the group's default. In a stream it keeps the order of the group's operations. */
EPD_API epd_status_t epd_noop(epd_group_t* group, uint32_t slot, void* stream, epd_ticket_t* ticket);

/* ---- completion ---------------------------------------------------------------------------- */

typedef struct epd_result {
  size_t size;
  epd_status_t status;             /* of the operation */
  int32_t failed_rank;             /* the rank that caused the failure; -1: none, or not known */
  uint64_t op_index;               /* the operation's number in its group; a guess if it failed */
  uint32_t num_recv_rows;          /* M, after a dispatch */
  uint32_t seen_us;                /* 0: nobody sees an operation before the device begins it */
  uint32_t launched_us;            /* 0, likewise */
  uint32_t done_us;                /* microseconds on the device, from begin to end; 0: not known */
  uint32_t num_dropped_selections; /* EPD_POLICY_DEGRADE: selections of this rank's tokens that counted as
                                      none, because their expert's rank is lost */
  uint32_t runs; /* 1. Of an operation captured in a graph: its replays that have ended, modulo 2^32 */
} epd_result_t;
static inline void epd_result_init(epd_result_t* result) {
  memset(result, 0, sizeof(*result));
  result->size = sizeof(*result);
}

/* Waits for the operation's end, and returns its status. Then the ticket is retired. The ticket of a captured
 * operation is not: each wait returns for a replay that none has returned for, with the result of the last
 * one. result may be NULL; it is filled when the operation has ended. timeout_ms 0: EPD_FOREVER.
 *
 * WOULD_BLOCK (EPD_NO_WAIT), or DEADLINE_EXCEEDED while epd_ticket_pending is 1: still in flight, and the
 * ticket stays valid. NOT_FOUND: never issued, retired, or of another group; or its result has been
 * replaced (a rank keeps those of its last 1024 operations, and of its last 8192 captured ones).
 * INVALID_ARGUMENT: timeout_ms; or the operation's own status. */
EPD_API epd_status_t epd_ticket_wait(epd_group_t* group, epd_ticket_t ticket, int32_t timeout_ms,
                                     epd_result_t* result);
/* epd_ticket_wait with EPD_NO_WAIT. The same errors. */
EPD_API epd_status_t epd_ticket_poll(epd_group_t* group, epd_ticket_t ticket, epd_result_t* result);
/* 1 while the operation is in flight (a captured one: until a replay ends that no wait has returned for),
 * else 0; 0 also for a ticket that is not known. */
EPD_API int epd_ticket_pending(epd_group_t* group, epd_ticket_t ticket);

/* One step of a program that goes on after breaks. It waits for the end of the operation *ticket. If a break
 * has undone the operation, it also waits for the group's new epoch, as epd_group_resume does. Then
 * info->resume_op is the operation to submit next: the one behind it, or after a break the first one to be
 * repeated, which this rank may have completed. A program with one operation in flight, whose operations have
 * the group's numbers, is this loop:
 *
 *   for (ticket = 0;;) {
 *     status = epd_group_advance(group, &ticket, EPD_FOREVER, NULL, &info);
 *     if (status != EPD_OK || info.resume_op == end) return status;
 *     status = submit(info.resume_op, &ticket);
 *     if (status != EPD_OK && !epd_is_break(status)) return status;
 *   }
 *
 * Several in flight: if info->epoch has changed, drop the other tickets, and submit all again from
 * resume_op on.
 *
 * *ticket becomes 0 if the operation has ended, well or not. Otherwise it is in flight: call again. If
 * *ticket is 0 before, or ticket is NULL, the call is epd_group_resume: at the beginning, or after a
 * submission that has failed. resume_op is then behind the operations of the epoch whose end
 * epd_group_advance has told. result: as of epd_ticket_wait; result->status is EPD_OK if the operation has
 * ended well. It is not written while there is no end. result and info may be NULL.
 *
 * timeout_ms 0: EPD_FOREVER. WOULD_BLOCK (EPD_NO_WAIT) or DEADLINE_EXCEEDED: the operation is in flight, or
 * the group has not agreed on a new epoch; never the operation's own status. RANK_LOST: the group has ended,
 * or this rank was evicted or late. INVALID_ARGUMENT, RESOURCE_EXHAUSTED, INTERNAL: the operation's own
 * status, and nothing was resumed. ABORTED: another thread has left. NOT_FOUND: as of epd_ticket_wait.
 * INVALID_ARGUMENT: timeout_ms. */
EPD_API epd_status_t epd_group_advance(epd_group_t* group, epd_ticket_t* ticket, int32_t timeout_ms,
                                       epd_result_t* result, epd_resume_info_t* info);

typedef struct epd_counts {
  size_t size;
  uint32_t num_recv_rows;        /* M; packed: with padding */
  const int32_t* rank_offsets;   /* [R+1], as in epd_buffers_t, but in host memory */
  const int32_t* expert_counts;  /* [E/R], likewise */
  const int32_t* expert_offsets; /* [E/R+1], likewise; NULL if compact */
} epd_counts_t;
static inline void epd_counts_init(epd_counts_t* counts) {
  memset(counts, 0, sizeof(*counts));
  counts->size = sizeof(*counts);
}

/* The counts of a dispatch, before its rows have all arrived. The arrays stay as they are until the next
 * operation on the slot. Does not retire the ticket. timeout_ms 0: EPD_FOREVER.
 *
 * WOULD_BLOCK (EPD_NO_WAIT) or DEADLINE_EXCEEDED: not yet. The operation's own status: it failed first.
 * NOT_FOUND: as of epd_ticket_wait, or a later operation on the slot has replaced the counts.
 * INVALID_ARGUMENT: not a dispatch, or timeout_ms. */
EPD_API epd_status_t epd_ticket_counts(epd_group_t* group, epd_ticket_t ticket, int32_t timeout_ms,
                                       epd_counts_t* counts);

/* For an operation with defer_receive: waits until its inputs on this rank may be written again. A dispatch
 * has then sent this rank's rows; of a combine every rank has fetched what it needs, which on host devices is
 * the operation's end. On a GPU such an operation begins when all ranks have called it. epd_ticket_wait then
 * waits for the arrival. Does not retire the ticket. timeout_ms 0: EPD_FOREVER.
 *
 * WOULD_BLOCK (EPD_NO_WAIT) or DEADLINE_EXCEEDED: not yet. The operation's own status: it failed.
 * NOT_FOUND: as of epd_ticket_wait. INVALID_ARGUMENT: without defer_receive, or timeout_ms. */
EPD_API epd_status_t epd_ticket_wait_sent(epd_group_t* group, epd_ticket_t ticket, int32_t timeout_ms);

/* Makes a stream wait: its later work begins when the operation has ended. For operations that were submitted
 * in a stream, this one or another, any number of times until the ticket is retired. After defer_receive it
 * is the wait for arrival. The stream waits for the slot's last operation (MEMOP wait:
 * the last of that kind). Returns at once.
 *
 * NOT_FOUND: as of epd_ticket_wait. INVALID_ARGUMENT: EPD_NO_STREAM, here or at the submission. INTERNAL: the
 * driver's error. */
EPD_API epd_status_t epd_ticket_wait_on_stream(epd_group_t* group, epd_ticket_t ticket, void* stream);

/* *event: the CUDA event (CUevent, cudaEvent_t) that completes when the operation has ended, well or not,
 * also if the engine or the daemon has died. It belongs to the context of the session. Streams may wait for
 * it, and threads may query or synchronise it. It is an interprocess event without timing, so other processes
 * may open it too. The library owns it: don't record or destroy it. It is the slot's: the next operation on
 * the slot that a stream waits for takes it over. A wait that began before is not affected; a query then
 * tells of the later operation. It lives until epd_group_leave. May be called for a retired ticket.
 *
 * INVALID_ARGUMENT: the session has not attached with EPD_WAIT_BY_EVENT. UNSUPPORTED: a host device.
 * NOT_FOUND: not a ticket of an operation of this group in a stream; captured; with defer_receive, and no
 * stream waits for it yet (epd_ticket_wait_on_stream); or the slot has a later operation. */
EPD_API epd_status_t epd_ticket_event(epd_group_t* group, epd_ticket_t ticket, void** event);

/* The result is not wanted: retires the ticket. The operation goes on. NOT_FOUND: as of epd_ticket_wait, or
 * the ticket has a hook. */
EPD_API epd_status_t epd_ticket_drop(epd_group_t* group, epd_ticket_t ticket);

/* Calls hook(result, user) once, on a thread of the library, when the operation has ended, well or not; also
 * if it has ended already. The hook retires the ticket, so don't wait for it as well. A captured operation's
 * ticket stays valid, and takes a new hook for another replay. The first hook starts the thread (INTERNAL: it
 * can't be started). NOT_FOUND: as of epd_ticket_wait, or the ticket has a hook. */
typedef void (*epd_hook_t)(const epd_result_t* result, void* user);
EPD_API epd_status_t epd_ticket_on_complete(epd_group_t* group, epd_ticket_t ticket, epd_hook_t hook,
                                            void* user);

#ifdef __cplusplus
}
#endif

#endif /* EPD_EPD_H_ */
