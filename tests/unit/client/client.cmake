# The client library, without a daemon: see support/fake_daemon.h.
add_library(epd_fake_daemon STATIC ${CMAKE_CURRENT_SOURCE_DIR}/support/fake_daemon.cpp)
target_include_directories(epd_fake_daemon PUBLIC ${CMAKE_CURRENT_SOURCE_DIR}/support)
target_link_libraries(epd_fake_daemon PUBLIC epd_base PRIVATE epd_options)

add_executable(client_test
  ${CMAKE_CURRENT_LIST_DIR}/client_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/client_advance_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/client_ends_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/client_requests_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/client_restore_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/client_misuse_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/client_hooks_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/client_handles_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/client_attach_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/client_bytes_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/client_memory_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/client_ranks_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/client_wrapper_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/client_abi_test.cpp)
target_link_libraries(client_test PRIVATE epd::epd epd_fake_daemon GTest::gtest_main epd_options)
target_compile_definitions(client_test PRIVATE
  EPD_LIBRARY="$<TARGET_FILE:epd_client>"
  EPD_MAP="${PROJECT_SOURCE_DIR}/client/libepd.map"
  EPD_HEADER="${PROJECT_SOURCE_DIR}/client/include/epd/epd.h"
  EPD_SANITIZERS="$<JOIN:${EPD_SANITIZE},+>"
  EPD_VERSION_TEXT="${PROJECT_VERSION}")
# The library's parts: against its objects, to look into it.
add_executable(client_parts_test ${CMAKE_CURRENT_LIST_DIR}/client_parts_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/client_log_test.cpp $<TARGET_OBJECTS:epd_client_objects>)
target_include_directories(client_parts_test PRIVATE $<TARGET_PROPERTY:epd_client_objects,INTERFACE_INCLUDE_DIRECTORIES>)
target_compile_definitions(client_parts_test PRIVATE EPD_CLIENT_VERSION="${PROJECT_VERSION}")
target_link_libraries(client_parts_test PRIVATE epd_common GTest::gtest_main epd_options ${CMAKE_DL_LIBS})
epd_suites(client_parts_test LABEL unit TIMEOUT 300)
# CUDA devices, on the fake driver: against the library's objects, to look into it.
include(${CMAKE_CURRENT_SOURCE_DIR}/support/fake_cuda.cmake)
if(EPD_CUDA_DRIVER_INCLUDE_DIR AND EPD_FAKE_CUDA)
  add_executable(client_cuda_test ${CMAKE_CURRENT_LIST_DIR}/client_cuda_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/client_cuda_waits_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/client_events_test.cpp ${CMAKE_CURRENT_LIST_DIR}/client_calls_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/client_calls_memory_test.cpp ${CMAKE_CURRENT_LIST_DIR}/client_calls_ends_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/client_cuda_memory_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/watched_cuda.cpp $<TARGET_OBJECTS:epd_client_objects>)
  target_include_directories(client_cuda_test PRIVATE $<TARGET_PROPERTY:epd_client_objects,INTERFACE_INCLUDE_DIRECTORIES>)
  target_include_directories(client_cuda_test SYSTEM PRIVATE ${EPD_CUDA_DRIVER_INCLUDE_DIR})
  target_compile_definitions(client_cuda_test PRIVATE EPD_CLIENT_VERSION="${PROJECT_VERSION}" $<$<BOOL:${EPD_CUDA}>:EPD_CLIENT_HAS_KERNELS>)
  target_link_libraries(client_cuda_test PRIVATE fake_cuda epd_fake_daemon epd_proto GTest::gtest_main epd_options ${CMAKE_DL_LIBS})
  epd_suites(client_cuda_test LABEL unit TIMEOUT 300)
endif()
epd_suites(client_test LABEL unit TIMEOUT 300)
# A compiler in an older C++ mode gets one line that says so.
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/old_cxx.cpp "#include <epd/epd.hpp>\n")
add_test(NAME client.wrapper_names_its_cxx COMMAND ${CMAKE_CXX_COMPILER} -std=c++14 -fsyntax-only
  -I${PROJECT_SOURCE_DIR}/client/include ${CMAKE_CURRENT_BINARY_DIR}/old_cxx.cpp)
set_tests_properties(client.wrapper_names_its_cxx PROPERTIES LABELS unit PASS_REGULAR_EXPRESSION "epd.hpp needs C\\+\\+17")
# Ranges for profilers: a test that submits and waits, beside a tool that prints what it is told.
if(EPD_CUDA_DRIVER_INCLUDE_DIR AND EXISTS ${EPD_CUDA_DRIVER_INCLUDE_DIR}/nvtx3/nvToolsExt.h)
  add_library(nvtx_recorder MODULE ${CMAKE_CURRENT_SOURCE_DIR}/support/nvtx_recorder.cpp)
  target_include_directories(nvtx_recorder SYSTEM PRIVATE ${EPD_CUDA_DRIVER_INCLUDE_DIR})
  target_link_libraries(nvtx_recorder PRIVATE epd_options)
  add_test(NAME client.ranges COMMAND client_test --gtest_filter=ClientMemory.AFailedOperationWritesNothing)
  set_tests_properties(client.ranges PROPERTIES LABELS unit
    ENVIRONMENT "NVTX_INJECTION64_PATH=$<TARGET_FILE:nvtx_recorder>"
    PASS_REGULAR_EXPRESSION "nvtx domain epd\n.*nvtx begins dispatch\nnvtx ends\n.*nvtx begins ticket_wait\nnvtx ends")
  add_dependencies(client_test nvtx_recorder)
endif()
