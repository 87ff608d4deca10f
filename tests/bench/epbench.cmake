# epbench: the benchmark harness; a product tool, built with or without the tests.
include_guard(GLOBAL)

set(_bench ${CMAKE_CURRENT_LIST_DIR})
find_package(nlohmann_json REQUIRED)

add_executable(epbench
  ${_bench}/coordinator.cpp ${_bench}/gpu_driver.cpp ${_bench}/gpu_rank.cpp ${_bench}/lifecycle.cpp ${_bench}/main.cpp
  ${_bench}/options.cpp ${_bench}/plan.cpp ${_bench}/rank_device.cpp ${_bench}/report.cpp ${_bench}/report_gpu.cpp ${_bench}/snapshot.cpp
  ${_bench}/suite.cpp ${_bench}/worker.cpp)
target_link_libraries(epbench PRIVATE epd_kit epd_proto CLI11::CLI11 nlohmann_json::nlohmann_json epd_options ${CMAKE_DL_LIBS})
set_target_properties(epbench PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
install(TARGETS epbench RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
