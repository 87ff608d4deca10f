# epbench: the benchmark harness; a product tool, built with or without the tests.
include_guard(GLOBAL)

set(_bench ${CMAKE_CURRENT_LIST_DIR})
find_package(nlohmann_json REQUIRED)

add_executable(epbench
  ${_bench}/coordinator.cpp ${_bench}/gpu_ceiling.cpp ${_bench}/gpu_driver.cpp ${_bench}/gpu_rank.cpp ${_bench}/lifecycle.cpp ${_bench}/main.cpp
  ${_bench}/options.cpp ${_bench}/overlap.cpp ${_bench}/plan.cpp ${_bench}/rank_device.cpp ${_bench}/report.cpp ${_bench}/report_gpu.cpp ${_bench}/sms_changes.cpp ${_bench}/snapshot.cpp
  ${_bench}/suite.cpp ${_bench}/worker.cpp ${_bench}/worker_checks.cpp ${_bench}/worker_timing.cpp)
target_link_libraries(epbench PRIVATE epd_kit epd_proto CLI11::CLI11 nlohmann_json::nlohmann_json epd_options ${CMAKE_DL_LIBS})
target_include_directories(epbench PRIVATE ${PROJECT_SOURCE_DIR}/tests)
if(EPD_CUDA)  # the kernels of the ceiling on GPUs with bulk copies, as data
  set(_ceiling ${PROJECT_BINARY_DIR}/epbench_ceiling.fatbin)
  add_custom_command(OUTPUT ${_ceiling}
    COMMAND ${EPD_NVCC} --fatbin -std=c++20 -O3 -Xcompiler=-Wall --threads=2 --compress-mode=none
      --generate-code=arch=compute_90a,code=sm_90a
      --generate-code=arch=compute_100,code=sm_100
      -I ${PROJECT_SOURCE_DIR}/tests -I ${PROJECT_SOURCE_DIR}/kernels -I ${PROJECT_SOURCE_DIR}/kernels/include
      -MD -MF ${_ceiling}.d -MT ${_ceiling} -o ${_ceiling} ${_bench}/ceiling_kernels.cu
    DEPENDS ${_bench}/ceiling_kernels.cu DEPFILE ${_ceiling}.d
    COMMENT "Compiling the kernels of epbench's ceiling" VERBATIM)
  target_sources(epbench PRIVATE ${_bench}/ceiling_image.S)
  set_source_files_properties(${_bench}/ceiling_image.S PROPERTIES
    OBJECT_DEPENDS ${_ceiling} COMPILE_DEFINITIONS EPD_CEILING_IMAGE="${_ceiling}")
  target_compile_definitions(epbench PRIVATE EPD_BENCH_HAS_CEILING)
endif()
set_target_properties(epbench PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
install(TARGETS epbench RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
