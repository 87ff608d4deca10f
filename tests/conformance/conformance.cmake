include(${CMAKE_CURRENT_SOURCE_DIR}/support/support.cmake)
epd_system_test(operations_test LABEL conformance BY_KIND
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/operations_test.cpp ${CMAKE_CURRENT_LIST_DIR}/random_cases_test.cpp ${CMAKE_CURRENT_LIST_DIR}/modes_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/failures_test.cpp ${CMAKE_CURRENT_LIST_DIR}/streams_test.cpp ${CMAKE_CURRENT_LIST_DIR}/stream_failures_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/calls_test.cpp ${CMAKE_CURRENT_LIST_DIR}/calls_beside_test.cpp ${CMAKE_CURRENT_LIST_DIR}/memory_test.cpp ${CMAKE_CURRENT_LIST_DIR}/mapped_memory_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/memory_ranks.cpp ${CMAKE_CURRENT_LIST_DIR}/host_copies_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/calls_bystander_test.cpp ${CMAKE_CURRENT_LIST_DIR}/replaying_ranks.cpp ${CMAKE_CURRENT_LIST_DIR}/stream_rounds.cpp
    ${CMAKE_CURRENT_LIST_DIR}/conformance.cpp
  LIBS epd_kit)
# The same of groups that span nodes: two and three daemons in namespaces of their own.
epd_system_test(nodes_conformance_test LABEL nodes BY_KIND
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/operations_test.cpp ${CMAKE_CURRENT_LIST_DIR}/random_cases_test.cpp ${CMAKE_CURRENT_LIST_DIR}/modes_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/failures_test.cpp ${CMAKE_CURRENT_LIST_DIR}/conformance.cpp
  LIBS epd_kit)
target_compile_definitions(nodes_conformance_test PRIVATE EPD_TEST_NODES)
