foreach(_name numbers routing placement dispatch combine stores)
  add_executable(kernels_${_name}_test ${CMAKE_CURRENT_LIST_DIR}/kernels_${_name}_test.cpp)
  if(_name MATCHES "dispatch|combine")
    target_sources(kernels_${_name}_test PRIVATE ${CMAKE_CURRENT_LIST_DIR}/kernels_cases.cpp)
  endif()
  target_include_directories(kernels_${_name}_test PRIVATE ${PROJECT_SOURCE_DIR}/kernels)
  target_link_libraries(kernels_${_name}_test PRIVATE epd_kernels epd_options GTest::gtest_main Threads::Threads)
  gtest_discover_tests(kernels_${_name}_test DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    PROPERTIES LABELS unit TIMEOUT 300)
endforeach()

# Device code that one thread runs, with its range checks.
add_executable(kernels_ranges_test ${CMAKE_CURRENT_LIST_DIR}/kernels_ranges_test.cpp)
target_compile_definitions(kernels_ranges_test PRIVATE EPD_KERNEL_ASSERTS)
target_include_directories(kernels_ranges_test PRIVATE ${PROJECT_SOURCE_DIR}/kernels ${CMAKE_CURRENT_SOURCE_DIR}/support)
target_link_libraries(kernels_ranges_test PRIVATE epd_kernels epd_options GTest::gtest_main)
gtest_discover_tests(kernels_ranges_test DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
  PROPERTIES LABELS unit TIMEOUT 60)

if(EPD_CUDA)
  add_executable(kernels_cuda_test ${CMAKE_CURRENT_LIST_DIR}/kernels_cuda_test.cpp)
  target_include_directories(kernels_cuda_test PRIVATE ${PROJECT_SOURCE_DIR}/kernels)
  target_link_libraries(kernels_cuda_test PRIVATE epd_kernels_cuda epd_options GTest::gtest_main)
  gtest_discover_tests(kernels_cuda_test DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    PROPERTIES LABELS unit TIMEOUT 60)
endif()
