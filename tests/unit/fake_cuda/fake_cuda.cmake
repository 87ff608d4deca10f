include(${CMAKE_CURRENT_SOURCE_DIR}/support/fake_cuda.cmake)
if(EPD_FAKE_CUDA)
  add_executable(fake_cuda_test ${CMAKE_CURRENT_LIST_DIR}/fake_cuda_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/fake_cuda_processes_test.cpp)
  add_executable(fake_cuda_kernels_test ${CMAKE_CURRENT_LIST_DIR}/fake_cuda_calls_test.cpp ${CMAKE_CURRENT_LIST_DIR}/fake_cuda_call_ends_test.cpp ${CMAKE_CURRENT_SOURCE_DIR}/unit/kernels/kernels_calls_test.cpp ${CMAKE_CURRENT_LIST_DIR}/fake_cuda_call_world.cpp
    ${CMAKE_CURRENT_LIST_DIR}/fake_cuda_gates_test.cpp ${CMAKE_CURRENT_LIST_DIR}/fake_cuda_graph_test.cpp ${CMAKE_CURRENT_LIST_DIR}/fake_cuda_pairs_test.cpp ${CMAKE_CURRENT_LIST_DIR}/fake_cuda_words_test.cpp ${CMAKE_CURRENT_LIST_DIR}/fake_cuda_world.cpp)
  target_link_libraries(fake_cuda_test PRIVATE GTest::gtest)
  target_link_libraries(fake_cuda_kernels_test PRIVATE GTest::gtest_main epd_proto)
  foreach(_name fake_cuda_test fake_cuda_kernels_test)
    target_include_directories(${_name} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/support ${PROJECT_SOURCE_DIR}/client/src)
    target_link_libraries(${_name} PRIVATE fake_cuda epd_kernels epd_options Threads::Threads)
    gtest_discover_tests(${_name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES LABELS unit TIMEOUT 300)
  endforeach()
endif()
