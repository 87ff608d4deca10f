// The environment that UCX wants, before any thread; and the peer process of transport_processes_test.cpp.
#include "transport/ucx.h"
#include "transport_child.h"

#include <gtest/gtest.h>
#include <cstdlib>
#include <cstring>

int main(int argc, char** argv) {
  for (const auto& [name, value] : epd::transport::ucx_environment())
    ::setenv(name.c_str(), value.c_str(), 0);
  // Error handling by peer, over shared memory too: tests only.
  for (const char* name : {"UCX_POSIX_ERROR_HANDLING", "UCX_CMA_ERROR_HANDLING"}) ::setenv(name, "y", 0);
  if (argc == 5 && std::strcmp(argv[1], "--peer") == 0) {
    return epd::transport::run_child(argv[2], std::strtoull(argv[3], nullptr, 10),
                                     static_cast<epd::transport::Carrier>(std::atoi(argv[4])));
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
