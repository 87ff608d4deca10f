# ctest includes this file by epd_system_suites(): one test for each suite and kind of a program whose tests are
# named Prefix/Suite.Test/kind. So a daemon is started once for all of them.
function(epd_add_suites program label timeout lock environment)
  execute_process(COMMAND ${program} --gtest_list_tests OUTPUT_VARIABLE listed RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${program} --gtest_list_tests: ${result}")
  endif()
  string(REPLACE "\n" ";" lines "${listed}")
  set(suite)
  set(known)
  foreach(line IN LISTS lines)
    if(line MATCHES "^([^ ]+)\\.( |$)")
      set(suite ${CMAKE_MATCH_1})
    elseif(line MATCHES "^  [^ ]+/([^ /]+)( |$)")
      set(name ${suite}/${CMAKE_MATCH_1})
      list(FIND known ${name} found)
      if(found EQUAL -1)
        list(APPEND known ${name})
        add_test(${name} ${program} "--gtest_filter=${suite}.*/${CMAKE_MATCH_1}")
        # Skipped is what skipped all of its tests: behind them nothing is listed as failed.
        set_tests_properties(${name} PROPERTIES LABELS ${label} TIMEOUT ${timeout} ${lock}
          ENVIRONMENT "${environment}" SKIP_REGULAR_EXPRESSION
            "\\[  PASSED  \\] 0 tests\\.\n\\[  SKIPPED \\] [0-9]+ tests?, listed below:\n(\\[  SKIPPED \\] [^\n]*\n*)+$")
      endif()
    elseif(line MATCHES "^  [^ ]")
      message(FATAL_ERROR "${program}: ${line} has no kind")
    endif()
  endforeach()
endfunction()
