include(${CMAKE_CURRENT_LIST_DIR}/../support/fake_cuda.cmake)
if(EPD_FAKE_CUDA)
  add_executable(fake_cuda_kernels_test ${CMAKE_CURRENT_LIST_DIR}/fake_cuda_kernels_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/fake_cuda_world.cpp)
  target_include_directories(fake_cuda_kernels_test PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_link_libraries(fake_cuda_kernels_test PRIVATE fake_cuda epd_kernels epd_options GTest::gtest_main Threads::Threads)
  gtest_discover_tests(fake_cuda_kernels_test DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    PROPERTIES LABELS unit TIMEOUT 300)
endif()
