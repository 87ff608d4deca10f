add_executable(session_test ${CMAKE_CURRENT_LIST_DIR}/session_test.cpp)
target_link_libraries(session_test PRIVATE epd_session epd_options GTest::gtest_main)
epd_suites(session_test LABEL unit TIMEOUT 300)
target_sources(session_test PRIVATE ${CMAKE_CURRENT_LIST_DIR}/session_requests_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/session_listener_test.cpp ${CMAKE_CURRENT_LIST_DIR}/session_porter_test.cpp
  ${CMAKE_CURRENT_SOURCE_DIR}/support/census.cpp)
target_include_directories(session_test PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/daemon/session)
