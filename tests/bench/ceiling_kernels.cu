// The image that gpu_ceiling.cpp launches from.
#include "gpu/ceiling.cuh"
