# What is installed as a service, and the Debian packages. Scripts: see README.md.
add_test(NAME deploy.units COMMAND ${CMAKE_CURRENT_LIST_DIR}/units_test.sh ${PROJECT_BINARY_DIR})
set_tests_properties(deploy.units PROPERTIES LABELS deploy TIMEOUT 60 SKIP_RETURN_CODE 77)
if(NOT EPD_SANITIZE)  # the packages would need the sanitizer's runtime too
  add_test(NAME deploy.package COMMAND ${CMAKE_CURRENT_LIST_DIR}/package_test.sh ${PROJECT_BINARY_DIR})
  set_tests_properties(deploy.package PROPERTIES LABELS deploy TIMEOUT 600 SKIP_RETURN_CODE 77)
endif()
