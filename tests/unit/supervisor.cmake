# Rooms of the supervisor: session, membership, configuration.
foreach(_name session membership)
  add_executable(${_name}_test ${CMAKE_CURRENT_LIST_DIR}/${_name}_test.cpp)
  target_link_libraries(${_name}_test PRIVATE epd_${_name} epd_options GTest::gtest_main)
  gtest_discover_tests(${_name}_test DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES LABELS unit TIMEOUT 60)
endforeach()
target_sources(membership_test PRIVATE ${CMAKE_CURRENT_LIST_DIR}/membership_join_test.cpp ${CMAKE_CURRENT_LIST_DIR}/membership_engines_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/membership_degrade_test.cpp ${CMAKE_CURRENT_LIST_DIR}/membership_waits_test.cpp ${CMAKE_CURRENT_LIST_DIR}/membership_random_test.cpp)
add_executable(config_test ${CMAKE_CURRENT_LIST_DIR}/config_test.cpp)
target_link_libraries(config_test PRIVATE epd_supervisor epd_options GTest::gtest_main)
target_compile_definitions(config_test PRIVATE EPD_SHIPPED_CONFIG="${PROJECT_SOURCE_DIR}/deploy/epd.toml")
gtest_discover_tests(config_test DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES LABELS unit TIMEOUT 60)
add_executable(mps_test ${CMAKE_CURRENT_LIST_DIR}/mps_test.cpp)
target_include_directories(mps_test PRIVATE ${PROJECT_SOURCE_DIR}/daemon/supervisor)
target_link_libraries(mps_test PRIVATE epd_supervisor epd_options GTest::gtest_main)
target_compile_definitions(mps_test PRIVATE
  EPD_FAKE_MPS_CONTROL="${CMAKE_CURRENT_LIST_DIR}/../support/fake_mps_control.sh")
gtest_discover_tests(mps_test DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES LABELS unit TIMEOUT 60)
