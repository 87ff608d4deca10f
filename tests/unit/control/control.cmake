# Control plane and epctl, against a supervisor made of fixed answers.
add_library(epd_fake_control STATIC support/fake_control_facade.cpp)
target_include_directories(epd_fake_control PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(epd_fake_control PUBLIC epd_control epd_control_messages PRIVATE epd_options)

add_executable(control_test ${CMAKE_CURRENT_LIST_DIR}/control_test.cpp ${CMAKE_CURRENT_LIST_DIR}/control_server_test.cpp ${CMAKE_CURRENT_LIST_DIR}/control_tools_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/control_users_test.cpp)
target_include_directories(control_test PRIVATE ${PROJECT_SOURCE_DIR}/daemon/control)
target_link_libraries(control_test PRIVATE epd_fake_control epd_control_proto epd_build_info epd_options GTest::gtest_main)
epd_suites(control_test LABEL unit TIMEOUT 300)

add_executable(fake_control support/fake_control_main.cpp)
target_link_libraries(fake_control PRIVATE epd_fake_control epd_options)

add_executable(ctl_test ${CMAKE_CURRENT_SOURCE_DIR}/unit/ctl/ctl_test.cpp ${CMAKE_CURRENT_SOURCE_DIR}/unit/ctl/ctl_output_test.cpp ${CMAKE_CURRENT_SOURCE_DIR}/unit/ctl/ctl_tools_test.cpp ${CMAKE_CURRENT_SOURCE_DIR}/unit/ctl/ctl_size_test.cpp ${CMAKE_CURRENT_SOURCE_DIR}/unit/ctl/ctl_parts_test.cpp
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/ctl/ctl_connection_test.cpp ${CMAKE_CURRENT_SOURCE_DIR}/unit/ctl/ctl_network_test.cpp)
target_compile_definitions(ctl_test PRIVATE EPCTL_PATH="$<TARGET_FILE:epctl>"
                                            FAKE_CONTROL_PATH="$<TARGET_FILE:fake_control>")
target_link_libraries(ctl_test PRIVATE epd_ctl epd_common epd_proto epd_options GTest::gtest_main)
add_dependencies(ctl_test epctl fake_control)
epd_suites(ctl_test LABEL unit TIMEOUT 300)
