# The program that the guide shows is the example that is built and run.
add_test(NAME guide_shows_the_example
  COMMAND ${CMAKE_COMMAND} -DREADME=${PROJECT_SOURCE_DIR}/client/GUIDE.md
          -DEXAMPLE=${PROJECT_SOURCE_DIR}/client/examples/minimal.cpp
          -P ${PROJECT_SOURCE_DIR}/deploy/cmake/contains_file.cmake)
set_tests_properties(guide_shows_the_example PROPERTIES LABELS unit TIMEOUT 10)
