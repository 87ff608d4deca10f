foreach(_name proto base)
  add_executable(${_name}_test ${CMAKE_CURRENT_SOURCE_DIR}/unit/${_name}/${_name}_test.cpp)
  target_link_libraries(${_name}_test PRIVATE epd_proto epd_base epd_options GTest::gtest_main)
  gtest_discover_tests(${_name}_test DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES LABELS unit TIMEOUT 60)
endforeach()
target_sources(proto_test PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/unit/proto/proto_arena_test.cpp
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/proto/proto_far_test.cpp ${CMAKE_CURRENT_SOURCE_DIR}/unit/proto/page_text_test.cpp)
find_package(nlohmann_json REQUIRED)
target_include_directories(base_test PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_sources(base_test PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/support/census.cpp ${CMAKE_CURRENT_LIST_DIR}/event_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/gate_test.cpp ${CMAKE_CURRENT_LIST_DIR}/utf8_test.cpp)
target_link_libraries(base_test PRIVATE nlohmann_json::nlohmann_json)
