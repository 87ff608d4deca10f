# The operations on the host, and what device code computes that one thread can run.
add_executable(kernels_host_test)
foreach(_name crc32c_test numbers_test routing_test placement_test dispatch_test combine_test far_dispatch_test
        far_combine_test far_asks_test stores_test cases received answers far_cases far_world)
  target_sources(kernels_host_test PRIVATE ${CMAKE_CURRENT_LIST_DIR}/kernels_${_name}.cpp)
endforeach()
target_include_directories(kernels_host_test PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/kernels)
target_link_libraries(kernels_host_test PRIVATE epd_kernels epd_options GTest::gtest_main Threads::Threads)
if(EPD_CUDA)
  target_sources(kernels_host_test PRIVATE ${CMAKE_CURRENT_LIST_DIR}/kernels_cuda_test.cpp)
  target_link_libraries(kernels_host_test PRIVATE epd_kernels_cuda)
endif()
epd_suites(kernels_host_test LABEL unit TIMEOUT 300)

# This test has the range checks of device code.
add_executable(kernels_ranges_test ${CMAKE_CURRENT_LIST_DIR}/kernels_ranges_test.cpp)
target_compile_definitions(kernels_ranges_test PRIVATE EPD_KERNEL_ASSERTS)
target_include_directories(kernels_ranges_test PRIVATE ${PROJECT_SOURCE_DIR}/kernels ${CMAKE_CURRENT_SOURCE_DIR}/support)
target_link_libraries(kernels_ranges_test PRIVATE epd_kernels epd_options GTest::gtest_main)
epd_suites(kernels_ranges_test LABEL unit TIMEOUT 300)
