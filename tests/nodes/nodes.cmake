include(${CMAKE_CURRENT_SOURCE_DIR}/support/support.cmake)
find_package(nlohmann_json REQUIRED)
find_program(EPD_PYTHON NAMES python3 PATHS /usr/bin NO_DEFAULT_PATH)
# Several daemons on one machine, by loopback.
epd_system_test(nodes_test LABEL nodes TIMEOUT 300
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/nodes_test.cpp ${CMAKE_CURRENT_LIST_DIR}/nodes_refused_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/nodes_groups_test.cpp ${CMAKE_CURRENT_LIST_DIR}/nodes_faults_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/nodes_soak_test.cpp ${CMAKE_CURRENT_LIST_DIR}/nodes_network_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/nodes_flips_test.cpp
  LIBS nlohmann_json::nlohmann_json epd_cluster_proto epd_kit)
# A program with a node's certificate that floods the coordinator.
find_package(OpenSSL REQUIRED COMPONENTS SSL)
epd_system_test(nodes_flood_test LABEL nodes TIMEOUT 120 SOURCES ${CMAKE_CURRENT_LIST_DIR}/nodes_flood_test.cpp
  LIBS nlohmann_json::nlohmann_json epd_cluster_proto epd_kit OpenSSL::SSL)
# libucp with a network that flips bits: all functions are those of libucp itself but one.
find_library(EPD_UCP_LIBRARY ucp REQUIRED DOC "libucp, for tests")
add_library(flipping_ucp MODULE ${CMAKE_CURRENT_LIST_DIR}/flipping_ucp.cpp)
target_include_directories(flipping_ucp SYSTEM PRIVATE ${EPD_UCX_INCLUDE_DIR})
target_link_options(flipping_ucp PRIVATE -Wl,--no-as-needed)
target_link_libraries(flipping_ucp PRIVATE epd_proto epd_options ${EPD_UCP_LIBRARY} ${CMAKE_DL_LIBS})
target_compile_definitions(nodes_test PRIVATE EPD_TEST_FLIPPING_UCP="$<TARGET_FILE:flipping_ucp>")
add_dependencies(nodes_test flipping_ucp)
# Hostile programs on the data network: clients of UCX that speak to engines.
epd_system_test(nodes_hostile_test LABEL nodes TIMEOUT 180
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/nodes_hostile_test.cpp ${CMAKE_CURRENT_LIST_DIR}/hostile_ucx.cpp
  LIBS nlohmann_json::nlohmann_json epd_far epd_transport)
target_include_directories(nodes_hostile_test PRIVATE ${PROJECT_SOURCE_DIR}/daemon/transport)
target_include_directories(nodes_hostile_test SYSTEM PRIVATE ${EPD_UCX_INCLUDE_DIR})
# Nodes with addresses, links and counters of their own.
epd_system_test(nodes_lab_test LABEL nodes TIMEOUT 120 SOURCES ${CMAKE_CURRENT_LIST_DIR}/lab_test.cpp
  LIBS epd_kit nlohmann_json::nlohmann_json)
# What the tools say of a group that spans nodes.
add_test(NAME nodes.demo_same_checksum
  COMMAND ${CMAKE_CURRENT_LIST_DIR}/same_checksum.sh $<TARGET_FILE:epd-moe-demo>)
set(_epbench_nodes epbench nodes --ranks-per-node 2 --hidden 512 --experts 24 --pairs 2 --iters 2 --check all --json)
add_test(NAME nodes.epbench_two COMMAND ${_epbench_nodes} --nodes 2 --tokens 33,1 --rate 4gbit)
add_test(NAME nodes.epbench_three_packed_weighted
  COMMAND ${_epbench_nodes} --nodes 3 --tokens 20 --layout packed --payload fp8 --sum-ranks 3 --weighted --return-weights)
add_test(NAME nodes.epbench_bytes_on_the_link
  COMMAND ${EPD_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/bytes_on_the_link.py $<TARGET_FILE:epbench>)
epd_daemon_lock(nodes _lock)
set_tests_properties(nodes.demo_same_checksum nodes.epbench_two nodes.epbench_three_packed_weighted nodes.epbench_bytes_on_the_link
  PROPERTIES LABELS nodes TIMEOUT 120 ${_lock} SKIP_RETURN_CODE 77
  SKIP_REGULAR_EXPRESSION "nodes can't be made here: ")
