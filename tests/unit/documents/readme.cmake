# The program that README shows is the example that is built and run.
add_test(NAME readme_shows_the_example
  COMMAND ${CMAKE_COMMAND} -DREADME=${PROJECT_SOURCE_DIR}/README.md
          -DEXAMPLE=${PROJECT_SOURCE_DIR}/client/examples/minimal.cpp
          -P ${PROJECT_SOURCE_DIR}/deploy/cmake/contains_file.cmake)
set_tests_properties(readme_shows_the_example PROPERTIES LABELS unit TIMEOUT 10)
