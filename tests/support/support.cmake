include_guard(GLOBAL)
find_package(nlohmann_json REQUIRED)
include(${CMAKE_CURRENT_LIST_DIR}/daemon_lock.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/fake_cuda.cmake)
# Shared by the tests that run a real daemon and real client processes.
add_library(epd_test_support STATIC
  ${CMAKE_CURRENT_LIST_DIR}/census.cpp
  ${CMAKE_CURRENT_LIST_DIR}/rank_bodies.cpp
  ${CMAKE_CURRENT_LIST_DIR}/ranks.cpp
  ${CMAKE_CURRENT_LIST_DIR}/namespaces.cpp
  ${CMAKE_CURRENT_LIST_DIR}/sockets.cpp
  ${CMAKE_CURRENT_LIST_DIR}/daemon.cpp
  ${CMAKE_CURRENT_LIST_DIR}/daemon_cluster.cpp
  ${CMAKE_CURRENT_LIST_DIR}/case_checks.cpp
  ${CMAKE_CURRENT_LIST_DIR}/cases.cpp
  ${CMAKE_CURRENT_LIST_DIR}/client.cpp
  ${CMAKE_CURRENT_LIST_DIR}/cuda_memory.cpp
  ${CMAKE_CURRENT_LIST_DIR}/echo.cpp
  ${CMAKE_CURRENT_LIST_DIR}/far_steps.cpp
  ${CMAKE_CURRENT_LIST_DIR}/replayed.cpp
  ${CMAKE_CURRENT_LIST_DIR}/caller_memory.cpp
  ${CMAKE_CURRENT_LIST_DIR}/kill_points.cpp
  ${CMAKE_CURRENT_LIST_DIR}/engine_pages.cpp
  ${CMAKE_CURRENT_LIST_DIR}/raw_client.cpp
  ${CMAKE_CURRENT_LIST_DIR}/losses.cpp
  ${CMAKE_CURRENT_LIST_DIR}/script.cpp)
# These make and compare the data of tests: with -O1, a third of RandomCases' time on host devices was in cases.cpp.
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/cases.cpp ${CMAKE_CURRENT_LIST_DIR}/case_checks.cpp
  ${CMAKE_CURRENT_LIST_DIR}/caller_memory.cpp PROPERTIES COMPILE_OPTIONS -O2)
target_include_directories(epd_test_support PUBLIC ${CMAKE_CURRENT_SOURCE_DIR}
  ${PROJECT_SOURCE_DIR}/client/tools/kit/include)
target_compile_definitions(epd_test_support PUBLIC
  EPD_TEST_DAEMON="$<TARGET_FILE:epd>" EPD_TEST_EPCTL="$<TARGET_FILE:epctl>"
  EPD_TEST_CA="${PROJECT_SOURCE_DIR}/deploy/test-ca.sh")
target_link_libraries(epd_test_support PUBLIC epd_client epd_base epd_kernels epd_proto GTest::gtest
  nlohmann_json::nlohmann_json PRIVATE epd_options)

# epd_system_program(<name> SOURCES ... [LIBS ...]): a program of tests that start `epd`.
function(epd_system_program name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE epd_test_support epd_options GTest::gtest_main ${ARG_LIBS})
  add_dependencies(${name} epd epctl)
endfunction()

# epd_system_test(<name> LABEL <label> SOURCES ... [LIBS ...] [what epd_suites() takes]): such a program and its tests.
function(epd_system_test name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS" ${ARGN})
  epd_system_program(${name} SOURCES ${ARG_SOURCES} LIBS ${ARG_LIBS})
  epd_system_suites(${name} ${ARG_UNPARSED_ARGUMENTS})
endfunction()

# epd_system_suites(<name> LABEL <label> [ENVIRONMENT <modification>] ...): as epd_suites(), for tests that start `epd`.
function(epd_system_suites name)
  cmake_parse_arguments(ARG "" "LABEL;ENVIRONMENT" "" ${ARGN})
  epd_daemon_lock(${ARG_LABEL} properties)
  # CUDA devices where there are none: see fake_cuda/README.md.
  if(EPD_CUDA AND TARGET fake_cuda)
    add_dependencies(${name} fake_cuda)
    list(APPEND properties ENVIRONMENT LD_LIBRARY_PATH=$<TARGET_FILE_DIR:fake_cuda>)
  endif()
  if(ARG_ENVIRONMENT)
    list(APPEND properties ENVIRONMENT_MODIFICATION ${ARG_ENVIRONMENT})
  endif()
  epd_suites(${name} LABEL ${ARG_LABEL} TIMEOUT 600 ${ARG_UNPARSED_ARGUMENTS} PROPERTIES ${properties})
endfunction()
