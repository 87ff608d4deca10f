# The shared ABI and the daemon's base.
find_package(nlohmann_json REQUIRED)
set(_proto ${CMAKE_CURRENT_SOURCE_DIR}/unit/proto)
add_executable(base_test ${CMAKE_CURRENT_LIST_DIR}/base_test.cpp ${CMAKE_CURRENT_LIST_DIR}/event_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/gate_test.cpp ${CMAKE_CURRENT_LIST_DIR}/utf8_test.cpp ${CMAKE_CURRENT_SOURCE_DIR}/support/census.cpp
  ${_proto}/proto_test.cpp ${_proto}/proto_arena_test.cpp ${_proto}/proto_far_test.cpp ${_proto}/page_text_test.cpp)
target_include_directories(base_test PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(base_test PRIVATE epd_proto epd_base epd_options nlohmann_json::nlohmann_json GTest::gtest_main)
epd_suites(base_test LABEL unit TIMEOUT 300)
