// cuda.h, with everything that it declares visible: a function of that name is the library's own.
#pragma once

#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop
