# epd_suites(<program> LABEL <label> TIMEOUT <s> [BY_KIND] [PREFIX <text>] [FILTER <tests>] [ALONE <suite>...]
#   [NIGHTLY <suite>...] [PROPERTIES <name> <value>...])
# Gives ctest one test for each suite of a GoogleTest program: a suite runs in one process, and its name is its own among
# all programs. Each test of a suite that is ALONE, or chosen by a filter, has a process of its own. Suites that are
# NIGHTLY have that label, too: CI leaves them out. Tests of a program BY_KIND are named Prefix/Suite.Test/kind; each of
# its suites is one test for each kind.
function(epd_suites program)
  cmake_parse_arguments(ARG "BY_KIND" "LABEL;TIMEOUT;PREFIX;FILTER" "ALONE;NIGHTLY;PROPERTIES" ${ARGN})
  set(included ${CMAKE_CURRENT_BINARY_DIR}/${ARG_PREFIX}${program}_suites.cmake)
  file(GENERATE OUTPUT ${included} CONTENT "
include(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/suites_of_program.cmake)
epd_add_suites($<TARGET_FILE:${program}> \"${ARG_PREFIX}\" \"${ARG_FILTER}\" \"${ARG_BY_KIND}\" \"${ARG_ALONE}\" \"${ARG_NIGHTLY}\"
  ${ARG_LABEL} TIMEOUT ${ARG_TIMEOUT} ${ARG_PROPERTIES})
")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${included})
endfunction()
