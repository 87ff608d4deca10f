# epbench: the benchmark harness; a product tool, built with or without the tests.
include_guard(GLOBAL)

set(_bench ${CMAKE_CURRENT_LIST_DIR})
find_package(nlohmann_json REQUIRED)

add_executable(epbench
  ${_bench}/coordinator.cpp ${_bench}/gpu_ceiling.cpp ${_bench}/gpu_driver.cpp ${_bench}/gpu_image.cpp ${_bench}/gpu_rank.cpp ${_bench}/lifecycle.cpp ${_bench}/main.cpp
  ${_bench}/options.cpp ${_bench}/overlap.cpp ${_bench}/plan.cpp ${_bench}/rank_device.cpp ${_bench}/report.cpp ${_bench}/report_gpu.cpp ${_bench}/sms_changes.cpp ${_bench}/snapshot.cpp
  ${_bench}/start_gate.cpp
  ${_bench}/suite.cpp ${_bench}/worker.cpp ${_bench}/worker_checks.cpp ${_bench}/worker_timing.cpp)
target_link_libraries(epbench PRIVATE epd_kit epd_proto CLI11::CLI11 nlohmann_json::nlohmann_json epd_options ${CMAKE_DL_LIBS})
target_include_directories(epbench PRIVATE ${PROJECT_SOURCE_DIR}/tests)
if(EPD_CUDA)  # its own kernels, as data
  set(_image ${PROJECT_BINARY_DIR}/epbench.fatbin)
  add_custom_command(OUTPUT ${_image}
    COMMAND ${EPD_NVCC} --fatbin -std=c++20 -O3 -Xcompiler=-Wall --threads=2 --compress-mode=none
      --generate-code=arch=compute_80,code=sm_80
      --generate-code=arch=compute_90a,code=sm_90a
      --generate-code=arch=compute_100,code=sm_100
      -I ${PROJECT_SOURCE_DIR}/tests -I ${PROJECT_SOURCE_DIR}/kernels -I ${PROJECT_SOURCE_DIR}/kernels/include
      -I ${PROJECT_SOURCE_DIR}/proto/include
      -MD -MF ${_image}.d -MT ${_image} -o ${_image} ${_bench}/gpu_kernels.cu
    DEPENDS ${_bench}/gpu_kernels.cu DEPFILE ${_image}.d
    COMMENT "Compiling epbench's kernels" VERBATIM)
  target_sources(epbench PRIVATE ${_bench}/gpu_image.S)
  set_source_files_properties(${_bench}/gpu_image.S PROPERTIES
    OBJECT_DEPENDS ${_image} COMPILE_DEFINITIONS EPD_BENCH_IMAGE="${_image}")
  target_compile_definitions(epbench PRIVATE EPD_BENCH_HAS_KERNELS)
endif()
set_target_properties(epbench PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
install(TARGETS epbench RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
