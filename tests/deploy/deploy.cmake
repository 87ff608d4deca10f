# What is installed as a service, the Debian packages, the container image and the manifests. Scripts: see README.md.
add_test(NAME deploy.units COMMAND ${CMAKE_CURRENT_LIST_DIR}/units_test.sh ${PROJECT_BINARY_DIR})
set_tests_properties(deploy.units PROPERTIES LABELS deploy TIMEOUT 60 SKIP_RETURN_CODE 77)
add_test(NAME deploy.kubernetes COMMAND ${CMAKE_CURRENT_LIST_DIR}/kubernetes_test.py ${PROJECT_BINARY_DIR})
set_tests_properties(deploy.kubernetes PROPERTIES LABELS deploy TIMEOUT 300 SKIP_RETURN_CODE 77)
if(NOT EPD_SANITIZE)  # packages and image would need the sanitizer's runtime too
  add_test(NAME deploy.package COMMAND ${CMAKE_CURRENT_LIST_DIR}/package_test.sh ${PROJECT_BINARY_DIR})
  set_tests_properties(deploy.package PROPERTIES LABELS deploy TIMEOUT 600 SKIP_RETURN_CODE 77)
  add_test(NAME deploy.container COMMAND ${CMAKE_CURRENT_LIST_DIR}/container_test.py ${PROJECT_BINARY_DIR})
  set_tests_properties(deploy.container PROPERTIES LABELS deploy TIMEOUT 600 SKIP_RETURN_CODE 77)
endif()
