# epd_fuzzer(<name> SOURCE file [ROOM of the daemon whose private headers it includes] LIBS ... CORPUS dir
# RUNS n): with EPD_BUILD_FUZZERS a libFuzzer binary <name>;
# always <name>_replay, which a test runs over the corpus and n seeded mutations. deploy/fuzz.sh runs them longer.
function(epd_fuzzer name)
  cmake_parse_arguments(ARG "" "SOURCE;CORPUS;RUNS;ROOM" "LIBS" ${ARGN})
  set(_here ${CMAKE_CURRENT_FUNCTION_LIST_DIR})
  add_executable(${name}_replay ${_here}/${ARG_SOURCE} ${_here}/replay_main.cpp)
  target_link_libraries(${name}_replay PRIVATE ${ARG_LIBS} epd_options)
  target_include_directories(${name}_replay PRIVATE ${PROJECT_SOURCE_DIR}/daemon/${ARG_ROOM})
  file(GLOB _corpus CONFIGURE_DEPENDS ${_here}/corpus/${ARG_CORPUS}/*)
  add_test(NAME ${name}_replay COMMAND ${name}_replay --runs ${ARG_RUNS} ${_corpus})
  set_tests_properties(${name}_replay PROPERTIES TIMEOUT 120 LABELS fuzz)
  if(EPD_BUILD_FUZZERS)
    add_executable(${name} ${_here}/${ARG_SOURCE})
    target_compile_options(${name} PRIVATE -fsanitize=fuzzer)
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    target_link_libraries(${name} PRIVATE ${ARG_LIBS} epd_options)
    target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/daemon/${ARG_ROOM})
  endif()
endfunction()

epd_fuzzer(call_fuzz SOURCE call_fuzz.cpp CORPUS call RUNS 300 LIBS epd_engine_harness epd_base)
epd_fuzzer(attach_fuzz SOURCE attach_fuzz.cpp ROOM session CORPUS attach RUNS 1000 LIBS epd_session epd_membership)
epd_fuzzer(control_fuzz SOURCE control_fuzz.cpp CORPUS control RUNS 300 LIBS epd_fake_control epd_control_proto)
epd_fuzzer(config_fuzz SOURCE config_fuzz.cpp CORPUS config RUNS 1000 LIBS epd_supervisor)
epd_fuzzer(far_fuzz SOURCE far_fuzz.cpp CORPUS far RUNS 20000 LIBS epd_proto)
epd_fuzzer(cluster_fuzz SOURCE cluster_fuzz.cpp ROOM cluster CORPUS cluster RUNS 2000
  LIBS epd_cluster epd_membership epd_cluster_messages)
epd_fuzzer(cluster_wire_fuzz SOURCE cluster_wire_fuzz.cpp ROOM cluster CORPUS cluster_wire RUNS 20000
  LIBS epd_cluster epd_membership epd_cluster_messages)
if(EPD_BUILD_FUZZERS)
  # Coverage guides only where the code under test is instrumented too.
  foreach(_room base session membership cluster supervisor control engine device)
    target_compile_options(epd_${_room} PRIVATE -fsanitize=fuzzer-no-link)
  endforeach()
endif()
