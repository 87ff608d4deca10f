// Marks functions that both compilers take.
#pragma once

#ifdef __CUDACC__
#define EPD_HOST_DEVICE __host__ __device__
#else
#define EPD_HOST_DEVICE
#endif
