# Control plane and epctl, against a supervisor made of fixed answers.
add_library(epd_fake_control STATIC support/fake_control_facade.cpp)
target_include_directories(epd_fake_control PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(epd_fake_control PUBLIC epd_control PRIVATE epd_options)

add_executable(control_test unit/control_test.cpp)
target_link_libraries(control_test PRIVATE epd_fake_control epd_control_proto epd_options GTest::gtest_main)
gtest_discover_tests(control_test DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES LABELS unit TIMEOUT 120)
