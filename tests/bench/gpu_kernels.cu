// The image that gpu_image.cpp loads.
#include "bench/gemm.cuh"
#include "gpu/ceiling.cuh"
