include(${CMAKE_CURRENT_SOURCE_DIR}/support/transports.cmake)
# Transports: one conformance suite over all of them. UCX runs over TCP on loopback; peers that are killed are
# processes of this same program.
add_executable(transport_test
  ${CMAKE_CURRENT_LIST_DIR}/transport_ucx_test.cpp  # first: it looks at what a process has without UCX
  ${CMAKE_CURRENT_LIST_DIR}/transport_main.cpp
  ${CMAKE_CURRENT_LIST_DIR}/transport_child.cpp
  ${CMAKE_CURRENT_LIST_DIR}/transport_end.cpp
  ${CMAKE_CURRENT_LIST_DIR}/transport_flavors.cpp
  ${CMAKE_CURRENT_LIST_DIR}/transport_ends_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/transport_faulty_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/transport_processes_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/transport_traffic_test.cpp)

# Libraries that are not the UCX they seem: too old, and without most functions.
foreach(_kind old part)
  add_library(fake_ucx_${_kind} MODULE ${CMAKE_CURRENT_LIST_DIR}/transport_fake_ucx.c)
  string(TOUPPER ${_kind} _name)
  target_compile_definitions(transport_test PRIVATE EPD_TEST_UCX_${_name}="$<TARGET_FILE:fake_ucx_${_kind}>")
  add_dependencies(transport_test fake_ucx_${_kind})
endforeach()
target_compile_definitions(fake_ucx_old PRIVATE MINOR=12)
target_compile_definitions(fake_ucx_part PRIVATE MINOR=13)
target_include_directories(transport_test PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(transport_test PRIVATE epd_test_transports epd_options GTest::gtest Threads::Threads)
epd_suites(transport_test LABEL unit TIMEOUT 300 ALONE Ucx)
