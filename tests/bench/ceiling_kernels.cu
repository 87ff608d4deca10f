// The image that gpu_ceiling.cpp and overlap.cpp launch from.
#include "bench/gemm.cuh"
#include "gpu/ceiling.cuh"
