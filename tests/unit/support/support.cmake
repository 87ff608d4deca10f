# What tests take for right.
include(${CMAKE_CURRENT_SOURCE_DIR}/support/support.cmake)
add_executable(losses_test ${CMAKE_CURRENT_LIST_DIR}/losses_test.cpp)
target_link_libraries(losses_test PRIVATE epd_test_support GTest::gtest_main epd_options)
gtest_discover_tests(losses_test PROPERTIES TIMEOUT 60 LABELS unit)
