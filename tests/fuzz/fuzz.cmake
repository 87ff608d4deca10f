# epd_fuzzer(<name> SOURCE file LIBS ... CORPUS dir): with EPD_BUILD_FUZZERS a libFuzzer binary <name>;
# always <name>_replay, which a test runs over the corpus and some seeded mutations.
function(epd_fuzzer name)
  cmake_parse_arguments(ARG "" "SOURCE;CORPUS" "LIBS" ${ARGN})
  set(_here ${CMAKE_CURRENT_FUNCTION_LIST_DIR})
  add_executable(${name}_replay ${_here}/${ARG_SOURCE} ${_here}/replay_main.cpp)
  target_link_libraries(${name}_replay PRIVATE ${ARG_LIBS} epd_options)
  file(GLOB _corpus CONFIGURE_DEPENDS ${_here}/corpus/${ARG_CORPUS}/*)
  add_test(NAME ${name}_replay COMMAND ${name}_replay --runs 300 ${_corpus})
  set_tests_properties(${name}_replay PROPERTIES TIMEOUT 120 LABELS fuzz)
  if(EPD_BUILD_FUZZERS)
    add_executable(${name} ${_here}/${ARG_SOURCE})
    target_compile_options(${name} PRIVATE -fsanitize=fuzzer)
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    target_link_libraries(${name} PRIVATE ${ARG_LIBS} epd_options)
  endif()
endfunction()

epd_fuzzer(submission_fuzz SOURCE submission_fuzz.cpp CORPUS submission LIBS epd_engine_harness epd_base)
