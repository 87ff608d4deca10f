include(${CMAKE_CURRENT_SOURCE_DIR}/support/support.cmake)
include(${CMAKE_CURRENT_SOURCE_DIR}/support/transports.cmake)
# Tables and windows by themselves; the proxy; engines of several nodes in one process.
add_executable(far_test ${CMAKE_CURRENT_SOURCE_DIR}/support/engine_nodes.cpp)
foreach(_name far_span far_flow far_judge far_ledger far_seal far_side far_proxy far_engines late_network)
  target_sources(far_test PRIVATE ${CMAKE_CURRENT_LIST_DIR}/${_name}_test.cpp)
endforeach()
target_include_directories(far_test PRIVATE ${PROJECT_SOURCE_DIR}/daemon/engine)
target_link_libraries(far_test PRIVATE epd_engine_harness epd_test_support epd_engine epd_device epd_far epd_test_transports
  GTest::gtest_main epd_options)
epd_suites(far_test LABEL unit TIMEOUT 300)
