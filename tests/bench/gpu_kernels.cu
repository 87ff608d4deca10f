// The image that gpu_image.cpp loads.
#include "bench/gemm.cuh"
#include "gpu/gate.cuh"
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#include "gpu/ceiling.cuh"
#endif
