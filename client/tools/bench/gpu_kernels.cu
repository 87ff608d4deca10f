// The image that gpu_image.cpp loads.
#include "bench/attention.cuh"
#include "bench/gemm.cuh"
#include "bench/start_barrier_kernel.cuh"
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#include "bench/ceiling_kernels.cuh"
#endif
