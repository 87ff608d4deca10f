include(${CMAKE_CURRENT_SOURCE_DIR}/support/support.cmake)
find_package(nlohmann_json REQUIRED)
# Several daemons on one machine, by loopback.
epd_system_test(nodes_test LABEL nodes TIMEOUT 300
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/nodes_test.cpp ${CMAKE_CURRENT_LIST_DIR}/nodes_refused_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/nodes_groups_test.cpp ${CMAKE_CURRENT_LIST_DIR}/nodes_faults_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/nodes_network_test.cpp
  LIBS nlohmann_json::nlohmann_json epd_cluster_proto)
# Nodes with addresses, links and counters of their own.
epd_system_test(nodes_lab_test LABEL nodes TIMEOUT 120 SOURCES ${CMAKE_CURRENT_LIST_DIR}/lab_test.cpp
  LIBS epd_kit nlohmann_json::nlohmann_json)
