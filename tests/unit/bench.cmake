# The parts of epbench and the demo that decide what is measured and what counts as right.
add_executable(bench_test ${CMAKE_CURRENT_LIST_DIR}/bench_test.cpp)
target_link_libraries(bench_test PRIVATE epd_moe_model epd_kit GTest::gmock GTest::gtest_main epd_options)
gtest_discover_tests(bench_test PROPERTIES LABELS unit TIMEOUT 60)
