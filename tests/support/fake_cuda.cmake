include_guard(GLOBAL)
# A fake of the CUDA driver and of the devices behind it; see fake_cuda/README.md. Needs cuda.h of CUDA 13, no nvcc.
find_path(EPD_FAKE_CUDA_INCLUDE cuda.h HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES include)
set(EPD_FAKE_CUDA OFF)
if(EPD_FAKE_CUDA_INCLUDE)
  file(STRINGS ${EPD_FAKE_CUDA_INCLUDE}/cuda.h _version REGEX "^#define CUDA_VERSION [0-9]+")
  string(REGEX MATCH "[0-9]+$" _version "${_version}")
  if(_version GREATER_EQUAL 13000)
    set(EPD_FAKE_CUDA ON)
  endif()
endif()
if(NOT EPD_FAKE_CUDA)
  message(STATUS "No cuda.h of CUDA 13 or newer: no fake driver, and no tests with it")
  return()
endif()

set(EPD_FAKE_CUDA_DIR ${PROJECT_BINARY_DIR}/lib/fake_cuda)
set(_dir ${CMAKE_CURRENT_LIST_DIR}/fake_cuda)
add_library(fake_cuda SHARED
  ${_dir}/bench_kernels.cpp ${_dir}/context.cpp ${_dir}/device.cpp ${_dir}/errors.cpp ${_dir}/event.cpp ${_dir}/graph.cpp ${_dir}/ipc_calls.cpp
  ${_dir}/kernel_protocol.cpp ${_dir}/library.cpp ${_dir}/memory.cpp ${_dir}/memory_calls.cpp
  ${_dir}/operation_check.cpp ${_dir}/operation_exchange.cpp ${_dir}/operation_kernel.cpp ${_dir}/played_thread.cpp ${_dir}/stream.cpp ${_dir}/stream_calls.cpp ${_dir}/watching.cpp ${_dir}/word_kernels.cpp)
target_include_directories(fake_cuda PRIVATE ${PROJECT_SOURCE_DIR}/client/tools ${PROJECT_SOURCE_DIR}/proto/common/include
  ${CMAKE_CURRENT_LIST_DIR} ${CMAKE_CURRENT_LIST_DIR}/..
  ${PROJECT_SOURCE_DIR}/kernels ${PROJECT_SOURCE_DIR}/client/src  # device code that one thread runs
  ${PROJECT_SOURCE_DIR}/daemon/device ${PROJECT_SOURCE_DIR}/daemon/device/include)
target_compile_definitions(fake_cuda PRIVATE EPD_KERNEL_ASSERTS)  # range checks in that code
target_include_directories(fake_cuda SYSTEM PUBLIC ${EPD_FAKE_CUDA_INCLUDE})
target_link_libraries(fake_cuda PRIVATE epd_host_operation epd_kernels epd_proto epd_options Threads::Threads ${CMAKE_DL_LIBS})
# Nothing of the rooms inside shows, and threads of streams keep the library in memory.
target_link_options(fake_cuda PRIVATE -Wl,--version-script=${_dir}/exports.map -Wl,-z,nodelete)
set_target_properties(fake_cuda PROPERTIES
  LINK_DEPENDS ${_dir}/exports.map OUTPUT_NAME cuda VERSION 1 SOVERSION 1 LIBRARY_OUTPUT_DIRECTORY ${EPD_FAKE_CUDA_DIR})
