include(${CMAKE_CURRENT_SOURCE_DIR}/support/support.cmake)
find_package(nlohmann_json REQUIRED)
find_program(EPD_PYTHON NAMES python3 PATHS /usr/bin NO_DEFAULT_PATH)
# Several daemons on one machine, by loopback and in namespaces of their own.
find_package(OpenSSL REQUIRED COMPONENTS SSL)
set(_sources ${CMAKE_CURRENT_LIST_DIR}/hostile_ucx.cpp)
foreach(_name nodes nodes_refused nodes_faults nodes_soak nodes_network nodes_flips nodes_flood nodes_hostile lab)
  list(APPEND _sources ${CMAKE_CURRENT_LIST_DIR}/${_name}_test.cpp)
endforeach()
epd_system_test(nodes_test LABEL nodes NIGHTLY NodesFlood NodesHostileFlood NodesSoak SOURCES ${_sources}
  LIBS nlohmann_json::nlohmann_json epd_cluster_proto epd_kit epd_far epd_transport OpenSSL::SSL)
target_include_directories(nodes_test PRIVATE ${PROJECT_SOURCE_DIR}/daemon/transport)
target_include_directories(nodes_test SYSTEM PRIVATE ${EPD_UCX_INCLUDE_DIR})
# libucp with a network that flips bits: all functions are those of libucp itself but one.
find_library(EPD_UCP_LIBRARY ucp REQUIRED DOC "libucp, for tests")
add_library(flipping_ucp MODULE ${CMAKE_CURRENT_LIST_DIR}/flipping_ucp.cpp)
target_include_directories(flipping_ucp SYSTEM PRIVATE ${EPD_UCX_INCLUDE_DIR})
target_link_options(flipping_ucp PRIVATE -Wl,--no-as-needed)
target_link_libraries(flipping_ucp PRIVATE epd_proto epd_options ${EPD_UCP_LIBRARY} ${CMAKE_DL_LIBS})
target_compile_definitions(nodes_test PRIVATE EPD_TEST_FLIPPING_UCP="$<TARGET_FILE:flipping_ucp>")
add_dependencies(nodes_test flipping_ucp)
# The tools' output for a group that spans nodes.
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
