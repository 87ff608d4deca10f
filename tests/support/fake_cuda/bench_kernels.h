// The kernels of epbench (client/tools/bench): work of a client's that has nothing to do with epd.
#pragma once

#include "fake_cuda/stream.h"

namespace epd::fake_cuda {

inline constexpr char kGemmKernel[] = "bench_gemm";
inline constexpr char kStartBarrierKernel[] = "start_barrier_kernel";

inline constexpr const char* kLayerKernels[] = {"bench_random", "bench_attention_decode",
                                                "bench_attention_prefill"};
bool is_layer_kernel(const std::string& kernel);

// Launches of so many CTAs as the stream's work; the parameters are copied now. Nothing is computed: whether
// the device reaches the memory is all that is looked at.
Stream::Work gemm_kernel(const unsigned (&ctas)[3], void** parameters);
Stream::Work layer_kernel(const std::string& kernel, const unsigned (&ctas)[3], void** parameters);
inline constexpr const char* kProbeKernels[] = {"push_probe", "pull_probe"};
bool is_probe_kernel(const std::string& kernel);
// Copies a row to (or from) each place in turn, as the true ones do (client/tools/bench/copy_kernels.cuh).
Stream::Work probe_kernel(const std::string& kernel, void** parameters);
// Waits as the true one does (client/tools/bench/copy_kernels.cuh), and does not give up.
Stream::Work start_barrier_kernel(void** parameters);

}  // namespace epd::fake_cuda
