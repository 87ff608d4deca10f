# The cluster room: both sides of a stream over streams of the test's own, in stepped time; the port, and streams of gRPC's.
add_executable(cluster_test ${CMAKE_CURRENT_LIST_DIR}/cluster_sides_test.cpp ${CMAKE_CURRENT_LIST_DIR}/cluster_channel_test.cpp ${CMAKE_CURRENT_LIST_DIR}/cluster_settings_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/cluster_wire_test.cpp ${CMAKE_CURRENT_LIST_DIR}/cluster_groups_test.cpp ${CMAKE_CURRENT_LIST_DIR}/cluster_door_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/cluster_dialer_test.cpp ${CMAKE_CURRENT_LIST_DIR}/cluster_gate_test.cpp)
# membership.proto as protobuf's own code has it, which the daemon does without.
protobuf_generate(TARGET cluster_test LANGUAGE cpp APPEND_PATH PROTOS ${PROJECT_SOURCE_DIR}/proto/epd/v1/membership.proto)
target_include_directories(cluster_test SYSTEM PRIVATE ${CMAKE_CURRENT_BINARY_DIR})
target_include_directories(cluster_test PRIVATE ${PROJECT_SOURCE_DIR}/daemon/cluster ${PROJECT_BINARY_DIR}/daemon/cluster)
target_compile_definitions(cluster_test PRIVATE EPD_TEST_CA="${PROJECT_SOURCE_DIR}/deploy/test-ca.sh")
target_link_libraries(cluster_test PRIVATE epd_cluster epd_membership epd_cluster_messages epd_options GTest::gtest_main)
epd_suites(cluster_test LABEL unit TIMEOUT 300)
