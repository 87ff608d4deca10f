// Graphs that come from the capture of one stream: its work, one after the other.
#include "fake_cuda/stream.h"

#include <thread>

using namespace epd::fake_cuda;

namespace {

// The driver calls it from a thread of its own.
struct UserObject {
  UserObject(CUhostFn its, void* of_it) : destroy(its), given(of_it) {}
  UserObject(const UserObject&) = delete;
  UserObject& operator=(const UserObject&) = delete;
  ~UserObject() { std::thread(destroy, given).join(); }

  const CUhostFn destroy;
  void* const given;
};

// The contents of a graph, and of the executable that is made of it.
struct Graph {
  std::vector<Stream::Work> work;
  std::vector<std::shared_ptr<UserObject>> objects;
};

Table<Graph>& graphs() {
  static auto* const table = new Table<Graph>;
  return *table;
}
Table<Graph>& executables() {
  static auto* const table = new Table<Graph>;
  return *table;
}
Table<UserObject>& user_objects() {
  static auto* const table = new Table<UserObject>;
  return *table;
}

}  // namespace

CUresult CUDAAPI cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
  if (const CUresult error = enter("cuStreamBeginCapture", Needs::kContext)) return error;
  if (mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  if (handle == nullptr || handle == CU_STREAM_LEGACY) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const auto graph = reinterpret_cast<CUgraph>(graphs().add(std::make_shared<Graph>()));
  if (stream->begin_capture(mode, graph)) return CUDA_SUCCESS;
  graphs().remove(graph);
  return CUDA_ERROR_ILLEGAL_STATE;
}

CUresult CUDAAPI cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  if (const CUresult error = enter("cuStreamEndCapture", Needs::kContext)) return error;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *graph = nullptr;
  const std::unique_ptr<Stream::Captured> captured = stream->end_capture();
  if (captured == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  if (captured->spoiled) {
    graphs().remove(captured->graph);
    return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  }
  graphs().find(captured->graph)->work = std::move(captured->work);
  *graph = captured->graph;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id,
                                        CUgraph* graph, const CUgraphNode** nodes,
                                        const CUgraphEdgeData** edges, size_t* num_nodes) {
  if (const CUresult error = enter("cuStreamGetCaptureInfo", Needs::kContext)) return error;
  if (status == nullptr || nodes == nullptr || edges == nullptr || num_nodes == nullptr)
    return CUDA_ERROR_INVALID_VALUE;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *status = stream->capture_status();
  if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return CUDA_SUCCESS;
  stream->capture_info(*graph, *id);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuUserObjectCreate(CUuserObject* object, void* given, CUhostFn destroy, unsigned count,
                                    unsigned flags) {
  if (const CUresult error = enter("cuUserObjectCreate", Needs::kNothing)) return error;
  if (object == nullptr || destroy == nullptr || count != 1 || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
    return CUDA_ERROR_INVALID_VALUE;
  *object = reinterpret_cast<CUuserObject>(user_objects().add(std::make_shared<UserObject>(destroy, given)));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuUserObjectRelease(CUuserObject object, unsigned count) {
  if (const CUresult error = enter("cuUserObjectRelease", Needs::kNothing)) return error;
  return count != 1 || user_objects().remove(object) == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned count, unsigned flags) {
  if (const CUresult error = enter("cuGraphRetainUserObject", Needs::kNothing)) return error;
  const std::shared_ptr<Graph> known = graphs().find(graph);
  if (known == nullptr || count != 1 || flags != CU_GRAPH_USER_OBJECT_MOVE) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<UserObject> moved = user_objects().remove(object);
  if (moved == nullptr) return CUDA_ERROR_INVALID_VALUE;
  known->objects.push_back(std::move(moved));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  if (const CUresult error = enter("cuStreamIsCapturing", Needs::kContext)) return error;
  if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (Watcher* const sees = watcher()) sees->enqueues({.function = "cuStreamIsCapturing", .stream = handle});
  *status = stream->capture_status();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  if (const CUresult error = enter("cuThreadExchangeStreamCaptureMode", Needs::kNothing)) return error;
  if (mode == nullptr || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  *mode = std::exchange(thread_capture_mode, *mode);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphInstantiate(CUgraphExec* executable, CUgraph graph, unsigned long long) {
  if (const CUresult error = enter("cuGraphInstantiate", Needs::kContext)) return error;
  const std::shared_ptr<Graph> known = graphs().find(graph);
  if (known == nullptr || executable == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *executable = reinterpret_cast<CUgraphExec>(executables().add(std::make_shared<Graph>(*known)));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphLaunch(CUgraphExec executable, CUstream stream) {
  if (const CUresult error = enter("cuGraphLaunch", Needs::kContext)) return error;
  const std::shared_ptr<Graph> known = executables().find(executable);
  if (known == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (const Stream::Work& work : known->work) {
    if (const CUresult error = enqueue(stream, work)) return error;
  }
  return CUDA_SUCCESS;
}

// Launches that still run are not affected.
CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec executable) {
  if (const CUresult error = enter("cuGraphExecDestroy", Needs::kNothing)) return error;
  return executables().remove(executable) == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphDestroy(CUgraph graph) {
  if (const CUresult error = enter("cuGraphDestroy", Needs::kNothing)) return error;
  return graphs().remove(graph) == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
