include(${CMAKE_CURRENT_SOURCE_DIR}/support/support.cmake)
add_executable(far_test ${CMAKE_CURRENT_LIST_DIR}/far_span_test.cpp ${CMAKE_CURRENT_LIST_DIR}/far_flow_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/far_judge_test.cpp ${CMAKE_CURRENT_LIST_DIR}/far_ledger_test.cpp ${CMAKE_CURRENT_LIST_DIR}/far_seal_test.cpp)
target_link_libraries(far_test PRIVATE epd_far GTest::gtest_main epd_options)
gtest_discover_tests(far_test PROPERTIES TIMEOUT 60 LABELS unit)

# Host devices of several nodes in one process, over in-process transports.
add_executable(far_operations_test ${CMAKE_CURRENT_LIST_DIR}/far_operations_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/far_proxy_test.cpp ${CMAKE_CURRENT_LIST_DIR}/late_network_test.cpp ${CMAKE_CURRENT_LIST_DIR}/far_nodes.cpp ${CMAKE_CURRENT_LIST_DIR}/transport_port.cpp)
target_include_directories(far_operations_test PRIVATE ${PROJECT_SOURCE_DIR}/daemon/engine ${PROJECT_SOURCE_DIR}/daemon/device)
target_link_libraries(far_operations_test PRIVATE epd_test_support epd_engine epd_host_operation epd_far epd_transport
  GTest::gtest epd_options)
gtest_discover_tests(far_operations_test DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 300 LABELS unit)

# Engines of several nodes in one process.
add_executable(far_engines_test ${CMAKE_CURRENT_LIST_DIR}/far_engines_test.cpp ${CMAKE_CURRENT_LIST_DIR}/far_side_test.cpp
  ${CMAKE_CURRENT_SOURCE_DIR}/support/engine_nodes.cpp)
target_include_directories(far_engines_test PRIVATE ${PROJECT_SOURCE_DIR}/daemon/engine)
target_link_libraries(far_engines_test PRIVATE epd_engine_harness epd_test_support epd_engine epd_device epd_far
  epd_transport GTest::gtest epd_options)
gtest_discover_tests(far_engines_test DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 120 LABELS unit)
