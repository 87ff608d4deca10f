add_executable(far_test ${CMAKE_CURRENT_LIST_DIR}/far_span_test.cpp ${CMAKE_CURRENT_LIST_DIR}/far_flow_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/far_judge_test.cpp)
target_link_libraries(far_test PRIVATE epd_far GTest::gtest_main epd_options)
gtest_discover_tests(far_test PROPERTIES TIMEOUT 60 LABELS unit)
