add_library(epd_engine_harness STATIC ${CMAKE_CURRENT_SOURCE_DIR}/support/engine_harness.cpp)
target_include_directories(epd_engine_harness PUBLIC ${CMAKE_CURRENT_SOURCE_DIR}/support)
target_link_libraries(epd_engine_harness PUBLIC epd_base epd_engine PRIVATE epd_device epd_options)

add_executable(engine_test ${CMAKE_CURRENT_LIST_DIR}/engine_test.cpp ${CMAKE_CURRENT_LIST_DIR}/engine_parts_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/statistics_test.cpp ${CMAKE_CURRENT_LIST_DIR}/lane_share_test.cpp ${CMAKE_CURRENT_LIST_DIR}/route_heads_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/host_calls_test.cpp ${CMAKE_CURRENT_LIST_DIR}/host_operation_test.cpp ${CMAKE_CURRENT_LIST_DIR}/host_waits_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/signals_test.cpp)
target_include_directories(engine_test PRIVATE ${PROJECT_SOURCE_DIR}/daemon/engine ${PROJECT_SOURCE_DIR}/daemon/device)
target_link_libraries(engine_test PRIVATE epd_engine_harness epd_device epd_host_operation epd_kernels GTest::gtest_main epd_options)
gtest_discover_tests(engine_test PROPERTIES TIMEOUT 60 LABELS unit)

# On host devices and, with CUDA, on GPUs of the fake driver (fake_cuda.cmake, included after this).
add_executable(engine_calls_test ${CMAKE_CURRENT_LIST_DIR}/engine_calls_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/engine_calls_breaks_test.cpp ${CMAKE_CURRENT_LIST_DIR}/engine_restart_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/engine_wraps_test.cpp)
target_link_libraries(engine_calls_test PRIVATE epd_engine_harness epd_device epd_kernels GTest::gtest_main
  epd_options ${CMAKE_DL_LIBS})
set(environment)
if(EPD_CUDA)
  target_sources(engine_calls_test PRIVATE ${CMAKE_CURRENT_LIST_DIR}/engine_calls_room_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/engine_calls_sms_test.cpp ${CMAKE_CURRENT_LIST_DIR}/engine_calls_views_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/engine_streams_breaks_test.cpp ${CMAKE_CURRENT_LIST_DIR}/engine_stuck_device_test.cpp)
  target_compile_definitions(engine_calls_test PRIVATE EPD_TEST_FAKE_CUDA)
  add_dependencies(engine_calls_test fake_cuda)
  set(environment ENVIRONMENT LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/lib/fake_cuda)
endif()
gtest_discover_tests(engine_calls_test DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
  PROPERTIES TIMEOUT 60 LABELS unit ${environment})
