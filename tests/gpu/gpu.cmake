# Tests on true GPUs, with label gpu: skipped, and shown as that, where there is none. `ctest -L gpu` runs them.
# run.sh does the same and the measurements on a machine that has none of our libraries.
if(NOT EPD_CUDA)
  return()
endif()
get_filename_component(_toolkit ${EPD_NVCC} REALPATH)
get_filename_component(_toolkit ${_toolkit}/../.. ABSOLUTE)
find_library(EPD_CUDART cudart_static HINTS ${_toolkit}/lib64 ${_toolkit}/lib NO_CACHE)
find_library(EPD_CUDA_STUB cuda HINTS ${_toolkit}/lib64/stubs ${_toolkit}/lib/stubs NO_CACHE)
find_path(EPD_CUDA_HEADERS cuda_runtime.h HINTS ${_toolkit}/include NO_CACHE)
if(NOT EPD_CUDART OR NOT EPD_CUDA_STUB OR NOT EPD_CUDA_HEADERS)
  message(STATUS "No GPU tests: ${_toolkit} has no cudart_static, cuda (stub) or cuda_runtime.h")
  return()
endif()

set(_gpu ${CMAKE_CURRENT_LIST_DIR})
add_executable(kernels_test ${_gpu}/kernels_test.cpp)
target_include_directories(kernels_test PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/kernels)
target_include_directories(kernels_test SYSTEM PRIVATE ${EPD_CUDA_HEADERS})
target_link_libraries(kernels_test PRIVATE epd_kernels epd_kernels_cuda epd_options ${EPD_CUDART} ${EPD_CUDA_STUB}
  Threads::Threads ${CMAKE_DL_LIBS} rt)

# epd_gpu_test(<name> TIMEOUT <s> [MPS] COMMAND ...)
function(epd_gpu_test name)
  cmake_parse_arguments(ARG "MPS" "TIMEOUT" "COMMAND" ${ARGN})
  set(mps)
  if(ARG_MPS)
    set(mps --mps)
  endif()
  add_test(NAME gpu.${name} COMMAND ${_gpu}/with_gpus.sh ${mps} ${ARG_COMMAND})
  set_tests_properties(gpu.${name} PROPERTIES LABELS gpu TIMEOUT ${ARG_TIMEOUT} SKIP_RETURN_CODE 77 RUN_SERIAL TRUE)
endfunction()

epd_gpu_test(kernels TIMEOUT 120 COMMAND $<TARGET_FILE:kernels_test> 100)
epd_gpu_test(kernels_memcheck TIMEOUT 120 COMMAND compute-sanitizer --tool memcheck --error-exitcode 9
  $<TARGET_FILE:kernels_test> 60 1 256 no-failures no-resident)
epd_gpu_test(kernels_racecheck TIMEOUT 120 COMMAND compute-sanitizer --tool racecheck --error-exitcode 9
  $<TARGET_FILE:kernels_test> 40 1 256 no-failures no-landings no-resident)
# Tests that kill an engine take the clients of its GPU along under MPS: gpu_fault_test is about that.
set(_kills "*ThatIsKilled*:*ThatAreKilled*:*OutliveTheEngine*:*Engine*")
epd_gpu_test(faults MPS TIMEOUT 300 COMMAND $<TARGET_FILE:gpu_fault_test>)
epd_gpu_test(streams_launched MPS TIMEOUT 120
  COMMAND $<TARGET_FILE:operations_test> "--gtest_filter=*Streams*/cuda_by_kernel-${_kills}")
epd_gpu_test(streams_resident MPS TIMEOUT 180
  COMMAND $<TARGET_FILE:operations_test> "--gtest_filter=*Streams*/resident*-${_kills}")
epd_gpu_test(calls MPS TIMEOUT 240
  COMMAND $<TARGET_FILE:operations_test> "--gtest_filter=*Calls*/resident*-${_kills}")
epd_gpu_test(conformance MPS TIMEOUT 120
  COMMAND $<TARGET_FILE:operations_test> "--gtest_filter=*RandomCases*/resident:*Modes*/resident*-${_kills}")
epd_gpu_test(bound MPS TIMEOUT 180
  COMMAND $<TARGET_FILE:bound_test> "--gtest_filter=*/resident:*/cuda-${_kills}")
