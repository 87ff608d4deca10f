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
add_library(kernels_test_code OBJECT ${_gpu}/kernels_test.cpp)
target_include_directories(kernels_test_code PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/client/tools ${PROJECT_SOURCE_DIR}/kernels)
target_include_directories(kernels_test_code SYSTEM PRIVATE ${EPD_CUDA_HEADERS})
target_link_libraries(kernels_test_code PUBLIC epd_kernels epd_kernels_cuda epd_options ${EPD_CUDART} ${EPD_CUDA_STUB}
  Threads::Threads ${CMAKE_DL_LIBS} rt)
add_executable(kernels_test)
target_link_libraries(kernels_test PRIVATE kernels_test_code)

# epd_image_programs(<name> CODE <arch>... [DEFINE <name>...])
# Programs with another image of the kernels: kernels_test_<name>, and the daemon in bin/<name>, where EPD_TEST_BIN
# finds it. The linker finds that image before the one in epd_kernels_cuda, which it leaves out.
function(epd_image_programs name)
  cmake_parse_arguments(ARG "" "" "DEFINE;CODE" ${ARGN})
  list(TRANSFORM ARG_CODE PREPEND --generate-code=)
  list(TRANSFORM ARG_DEFINE PREPEND -D OUTPUT_VARIABLE defines)
  set(image ${CMAKE_CURRENT_BINARY_DIR}/epd_cuda_${name}.fatbin)
  epd_cuda_image(${image} ${ARG_CODE} ${defines})
  set(source ${CMAKE_CURRENT_BINARY_DIR}/image_${name}.S)  # a copy, since what an object depends on goes with its source
  configure_file(${PROJECT_SOURCE_DIR}/kernels/cuda/image.S ${source} COPYONLY)
  set_source_files_properties(${source} PROPERTIES
    OBJECT_DEPENDS ${image} COMPILE_DEFINITIONS "EPD_CUDA_IMAGE=\"${image}\";${ARG_DEFINE}")
  add_executable(kernels_test_${name} EXCLUDE_FROM_ALL ${source})
  target_link_libraries(kernels_test_${name} PRIVATE kernels_test_code)
  set(bin ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/${name})
  add_executable(epd_${name} EXCLUDE_FROM_ALL $<TARGET_OBJECTS:epd_main> ${source})
  add_dependencies(nightly kernels_test_${name} epd_${name})
  target_link_libraries(epd_${name} PRIVATE epd_main)
  target_link_options(epd_${name} PRIVATE -Wl,--strip-debug)
  set_target_properties(epd_${name} PROPERTIES OUTPUT_NAME epd RUNTIME_OUTPUT_DIRECTORY ${bin})
  add_custom_command(TARGET epd_${name} POST_BUILD
    COMMAND ${CMAKE_COMMAND} -E create_symlink ../epctl ${bin}/epctl VERBATIM)
endfunction()

# These images are for the tester's GPU alone: one takes 48 s to compile, and 80 s for both (2026-11-27). The
# target nightly builds them.
set(EPD_TEST_IMAGE_SM 90a CACHE STRING "The GPU that runs the tests' images of the kernels: 90a or 100")
string(REGEX MATCH "[0-9]+" _plain ${EPD_TEST_IMAGE_SM})
# This image has range checks (kernels/cuda/common/range.h).
epd_image_programs(asserts CODE arch=compute_${EPD_TEST_IMAGE_SM},code=sm_${EPD_TEST_IMAGE_SM} DEFINE EPD_KERNEL_ASSERTS)
# The code for devices before sm_90, as later ones run it: so it is tested where there is none of them.
epd_image_programs(sm80 CODE arch=compute_80,code=sm_${_plain})

# epd_gpu_test(<name> TIMEOUT <s> [MPS] [NIGHTLY] COMMAND ...)
function(epd_gpu_test name)
  cmake_parse_arguments(ARG "MPS;NIGHTLY" "TIMEOUT" "COMMAND" ${ARGN})
  set(mps)
  if(ARG_MPS)
    set(mps --mps)
  endif()
  set(labels gpu)
  if(ARG_NIGHTLY)
    list(APPEND labels nightly)
  endif()
  add_test(NAME gpu.${name} COMMAND ${_gpu}/with_gpus.sh ${mps} ${ARG_COMMAND})
  set_tests_properties(gpu.${name} PROPERTIES LABELS "${labels}" TIMEOUT ${ARG_TIMEOUT} SKIP_RETURN_CODE 77 RUN_SERIAL TRUE)
endfunction()

epd_gpu_test(kernels TIMEOUT 120 COMMAND $<TARGET_FILE:kernels_test> 100)
epd_gpu_test(kernels_memcheck TIMEOUT 120 COMMAND compute-sanitizer --tool memcheck --error-exitcode 9
  $<TARGET_FILE:kernels_test> 60 1 256 no-failures)
epd_gpu_test(kernels_racecheck TIMEOUT 120 COMMAND compute-sanitizer --tool racecheck --error-exitcode 9
  $<TARGET_FILE:kernels_test> 40 1 256 no-failures no-inboxes)
# These run the other images: the kernels, a few cases by the daemon, and a violation that has to be reported.
foreach(_name asserts sm80)
  epd_gpu_test(kernels_${_name} NIGHTLY TIMEOUT 240 COMMAND $<TARGET_FILE:kernels_test_${_name}> 100)
  epd_gpu_test(conformance_${_name} MPS NIGHTLY TIMEOUT 120 COMMAND ${CMAKE_COMMAND} -E env EPD_TEST_BIN=$<TARGET_FILE_DIR:epd_${_name}>
    $<TARGET_FILE:operations_test> "--gtest_filter=*RandomCases*/cuda")
endforeach()
epd_gpu_test(asserts_caught NIGHTLY TIMEOUT 60 COMMAND $<TARGET_FILE:kernels_test_asserts> out-of-range)
set_tests_properties(gpu.asserts_caught PROPERTIES PASS_REGULAR_EXPRESSION "raw.row is 1048576, allowed: none, or below 4096")
# Tests that kill an engine take the clients of its GPU along under MPS: gpu_fault_test is about that.
set(_kills "*ThatIsKilled*:*ThatAreKilled*:*OutliveTheEngine*:*Engine*")
epd_gpu_test(faults MPS TIMEOUT 300 COMMAND $<TARGET_FILE:gpu_fault_test>)
epd_gpu_test(streams MPS TIMEOUT 180
  COMMAND $<TARGET_FILE:operations_test> "--gtest_filter=*Streams*/cuda*-${_kills}")
epd_gpu_test(calls MPS TIMEOUT 240
  COMMAND $<TARGET_FILE:operations_test> "--gtest_filter=*Calls*/cuda*-${_kills}")
epd_gpu_test(memory MPS TIMEOUT 180
  COMMAND $<TARGET_FILE:operations_test> "--gtest_filter=*CallersMemory*/cuda*")
epd_gpu_test(conformance MPS TIMEOUT 120
  COMMAND $<TARGET_FILE:operations_test> "--gtest_filter=*RandomCases*/cuda:*Modes*/cuda*-${_kills}")
epd_gpu_test(without_mps TIMEOUT 120 COMMAND $<TARGET_FILE:operations_test> "--gtest_filter=*RandomCases*/cuda")
foreach(_name training decode_graph)
  epd_gpu_test(python_${_name} MPS TIMEOUT 180
    COMMAND ${_gpu}/python.sh ${CMAKE_RUNTIME_OUTPUT_DIRECTORY} $<TARGET_FILE:epd_client> python_${_name}.py)
endforeach()
epd_gpu_test(python_engines_restart MPS TIMEOUT 180
  COMMAND ${_gpu}/python.sh ${CMAKE_RUNTIME_OUTPUT_DIRECTORY} $<TARGET_FILE:epd_client> python_engines_die.py --how restart)
