# The parts of epbench and the demo that decide what is measured and what counts as right.
find_package(nlohmann_json REQUIRED)
add_executable(bench_test ${CMAKE_CURRENT_LIST_DIR}/bench_test.cpp ${CMAKE_CURRENT_LIST_DIR}/bench_routing_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/bench_results_test.cpp ${CMAKE_CURRENT_LIST_DIR}/bench_model_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/bench_nodes_test.cpp
  ${PROJECT_SOURCE_DIR}/client/tools/bench/nodes_report.cpp
  ${PROJECT_SOURCE_DIR}/client/tools/bench/plan.cpp)
target_include_directories(bench_test PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/client/tools)
target_link_libraries(bench_test PRIVATE epd_moe_model epd_kit epd_proto nlohmann_json::nlohmann_json GTest::gmock GTest::gtest_main epd_options)
epd_suites(bench_test LABEL unit TIMEOUT 300)
