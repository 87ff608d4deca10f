# Formatting is checked where clang-format and git are; elsewhere the test is shown as skipped.
add_test(NAME format_check COMMAND ${CMAKE_CURRENT_LIST_DIR}/../../deploy/lint.sh --format-only)
set_tests_properties(format_check PROPERTIES SKIP_RETURN_CODE 77 LABELS unit TIMEOUT 120)
