add_library(epd_engine_harness STATIC ${CMAKE_CURRENT_SOURCE_DIR}/support/engine_harness.cpp)
target_include_directories(epd_engine_harness PUBLIC ${CMAKE_CURRENT_SOURCE_DIR}/support)
target_link_libraries(epd_engine_harness PUBLIC epd_base epd_engine PRIVATE epd_device epd_options)

# On host devices and, with CUDA, on GPUs of the fake driver (fake_cuda.cmake, included after this).
add_executable(engine_test)
foreach(_name engine engine_parts engine_calls engine_calls_breaks engine_restart engine_wraps host_calls host_operation
        host_waits signals standing_routings statistics)
  target_sources(engine_test PRIVATE ${CMAKE_CURRENT_LIST_DIR}/${_name}_test.cpp)
endforeach()
target_include_directories(engine_test PRIVATE ${PROJECT_SOURCE_DIR}/daemon/engine ${PROJECT_SOURCE_DIR}/daemon/device)
target_link_libraries(engine_test PRIVATE epd_engine_harness epd_device epd_host_operation epd_kernels GTest::gtest_main
  epd_options ${CMAKE_DL_LIBS})
set(_fake)
if(EPD_CUDA)
  foreach(_name lane_share engine_calls_room engine_calls_sms engine_calls_views engine_streams_breaks engine_stuck_device)
    target_sources(engine_test PRIVATE ${CMAKE_CURRENT_LIST_DIR}/${_name}_test.cpp)
  endforeach()
  target_compile_definitions(engine_test PRIVATE EPD_TEST_FAKE_CUDA)
  add_dependencies(engine_test fake_cuda)
  set(_fake PROPERTIES ENVIRONMENT LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/lib/fake_cuda)
endif()
epd_suites(engine_test LABEL unit TIMEOUT 300 ${_fake})
