# Parts of the supervisor.
add_executable(supervisor_test)
foreach(_name arena_store ask config config_file device_choice engine_process live_config loop memory_limit messages mps
        network socket_watch system_calls told_breaks)
  target_sources(supervisor_test PRIVATE ${CMAKE_CURRENT_LIST_DIR}/${_name}_test.cpp)
endforeach()
target_include_directories(supervisor_test PRIVATE ${PROJECT_SOURCE_DIR}/daemon/supervisor ${CMAKE_CURRENT_SOURCE_DIR})
target_compile_definitions(supervisor_test PRIVATE EPD_SHIPPED_CONFIG="${PROJECT_SOURCE_DIR}/deploy/epd.toml"
  EPD_FAKE_MPS_CONTROL="${CMAKE_CURRENT_SOURCE_DIR}/support/fake_mps_control.sh")
target_link_libraries(supervisor_test PRIVATE epd_supervisor epd_control_messages epd_device epd_session epd_membership
  epd_transport epd_options GTest::gtest_main)
epd_suites(supervisor_test LABEL unit TIMEOUT 300)
