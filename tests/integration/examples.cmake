# The client's examples against a real daemon, and the installed package as others use it.
include(${CMAKE_CURRENT_LIST_DIR}/integration.cmake)
target_compile_definitions(integration_test PRIVATE
  EPD_EXAMPLE_MINIMAL="$<TARGET_FILE:epd_example_minimal>"
  EPD_EXAMPLE_MOE_LAYER_C="$<TARGET_FILE:epd_example_moe_layer_c>"
  EPD_EXAMPLE_MOE_LAYER_CPP="$<TARGET_FILE:epd_example_moe_layer_cpp>"
  EPD_EXAMPLE_RECOVERY_C="$<TARGET_FILE:epd_example_recovery_c>")
add_dependencies(integration_test epd_example_minimal epd_example_moe_layer_c epd_example_moe_layer_cpp epd_example_recovery_c)
if(TARGET epd_example_moe_graph_c AND EPD_CUDA AND EPD_FAKE_CUDA)
  target_compile_definitions(integration_test PRIVATE EPD_EXAMPLE_MOE_GRAPH_C="$<TARGET_FILE:epd_example_moe_graph_c>")
  add_dependencies(integration_test epd_example_moe_graph_c)
endif()

if(NOT EPD_SANITIZE)  # a consumer would need the sanitizer's runtime too
  add_test(NAME bundle_runs_beside_nothing_but_the_c_library
    COMMAND ${CMAKE_CURRENT_LIST_DIR}/bundle_test.sh ${PROJECT_BINARY_DIR})
  epd_daemon_lock(integration _lock)
  set_tests_properties(bundle_runs_beside_nothing_but_the_c_library PROPERTIES
    LABELS "integration;nightly" TIMEOUT 180 SKIP_RETURN_CODE 77 ${_lock})

  add_test(NAME client_package
    COMMAND ${CMAKE_COMMAND} -DBUILD_DIR=${PROJECT_BINARY_DIR} -DWORK_DIR=${CMAKE_CURRENT_BINARY_DIR}/package
            -DCONSUMER_DIR=${CMAKE_CURRENT_LIST_DIR}/../support/package -DVERSION=${PROJECT_VERSION}
            -DLIBDIR=${CMAKE_INSTALL_LIBDIR} -DC_COMPILER=${CMAKE_C_COMPILER} -DCXX_COMPILER=${CMAKE_CXX_COMPILER}
            -P ${CMAKE_CURRENT_LIST_DIR}/../support/package/check.cmake)
  set_tests_properties(client_package PROPERTIES LABELS integration TIMEOUT 180)
endif()
