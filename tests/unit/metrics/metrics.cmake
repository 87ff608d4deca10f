# Tests the metrics for Prometheus, against a supervisor made of fixed answers.
add_executable(metrics_test ${CMAKE_CURRENT_LIST_DIR}/families_test.cpp ${CMAKE_CURRENT_LIST_DIR}/metrics_server_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/rank_series_test.cpp)
target_include_directories(metrics_test PRIVATE ${PROJECT_SOURCE_DIR}/daemon/metrics)
target_link_libraries(metrics_test PRIVATE epd_metrics epd_fake_control PkgConfig::PROMETHEUS epd_options GTest::gmock GTest::gtest_main)
epd_suites(metrics_test LABEL unit TIMEOUT 300)
