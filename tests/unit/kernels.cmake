foreach(_name numbers routing operations)
  add_executable(kernels_${_name}_test ${CMAKE_CURRENT_LIST_DIR}/kernels_${_name}_test.cpp)
  target_include_directories(kernels_${_name}_test PRIVATE ${PROJECT_SOURCE_DIR}/kernels)
  target_link_libraries(kernels_${_name}_test PRIVATE epd_kernels epd_options GTest::gtest_main Threads::Threads)
  gtest_discover_tests(kernels_${_name}_test DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    PROPERTIES LABELS unit TIMEOUT 300)
endforeach()
