include(${CMAKE_CURRENT_SOURCE_DIR}/support/support.cmake)
epd_system_test(attach_test LABEL integration TIMEOUT 120 SOURCES ${CMAKE_CURRENT_LIST_DIR}/attach_test.cpp)
