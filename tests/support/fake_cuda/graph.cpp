// Graphs that come from the capture of one stream: its work, one after the other.
#include "fake_cuda/stream.h"

using namespace epd::fake_cuda;

namespace {

// Of a graph, and of what is made of it to be launched.
struct Graph {
  std::vector<Stream::Work> work;
};

Table<Graph>& graphs() {
  static auto* const table = new Table<Graph>;
  return *table;
}
Table<Graph>& executables() {
  static auto* const table = new Table<Graph>;
  return *table;
}

}  // namespace

CUresult CUDAAPI cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
  if (const CUresult error = enter("cuStreamBeginCapture", Needs::kContext)) return error;
  if (mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  if (handle == nullptr || handle == CU_STREAM_LEGACY) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return stream->begin_capture(mode) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
}

CUresult CUDAAPI cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  if (const CUresult error = enter("cuStreamEndCapture", Needs::kContext)) return error;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *graph = nullptr;
  const std::unique_ptr<Stream::Captured> captured = stream->end_capture();
  if (captured == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  if (captured->spoiled) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  *graph = reinterpret_cast<CUgraph>(graphs().add(std::make_shared<Graph>(Graph{std::move(captured->work)})));
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

// What has been launched of it still runs.
CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec executable) {
  if (const CUresult error = enter("cuGraphExecDestroy", Needs::kNothing)) return error;
  return executables().remove(executable) == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphDestroy(CUgraph graph) {
  if (const CUresult error = enter("cuGraphDestroy", Needs::kNothing)) return error;
  return graphs().remove(graph) == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
