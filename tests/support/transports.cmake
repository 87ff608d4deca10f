include_guard(GLOBAL)
# Transports for tests: within one process, and with faults.
add_library(epd_test_transports STATIC
  ${CMAKE_CURRENT_LIST_DIR}/faulty_transport.cpp ${CMAKE_CURRENT_LIST_DIR}/in_process_transport.cpp)
target_include_directories(epd_test_transports PUBLIC ${CMAKE_CURRENT_SOURCE_DIR}
  PRIVATE ${PROJECT_SOURCE_DIR}/daemon/transport)
target_link_libraries(epd_test_transports PUBLIC epd_transport PRIVATE epd_options)
