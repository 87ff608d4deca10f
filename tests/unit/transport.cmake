# Transports: one conformance suite over all of them. UCX runs over TCP on loopback; peers that are killed are
# processes of this same program.
add_executable(transport_test
  ${CMAKE_CURRENT_LIST_DIR}/transport_ucx_test.cpp  # first: it looks at what a process has without UCX
  ${CMAKE_CURRENT_LIST_DIR}/transport_main.cpp
  ${CMAKE_CURRENT_LIST_DIR}/transport_child.cpp
  ${CMAKE_CURRENT_LIST_DIR}/transport_end.cpp
  ${CMAKE_CURRENT_LIST_DIR}/transport_flavors.cpp
  ${CMAKE_CURRENT_LIST_DIR}/transport_ends_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/transport_faulty_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/transport_processes_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/transport_traffic_test.cpp)

target_link_libraries(transport_test PRIVATE epd_transport epd_options GTest::gtest Threads::Threads)
gtest_discover_tests(transport_test DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES LABELS unit TIMEOUT 120)
