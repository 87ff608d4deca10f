# Formatting is checked where clang-format and git are; elsewhere the test is shown as skipped.
add_test(NAME format_check COMMAND ${PROJECT_SOURCE_DIR}/deploy/lint.sh --format-only)
set_tests_properties(format_check PROPERTIES SKIP_RETURN_CODE 77 LABELS unit TIMEOUT 120)

# Documents: lines, links and words; and that the check finds what it looks for.
add_test(NAME documents_check COMMAND ${PROJECT_SOURCE_DIR}/deploy/lint.sh --documents)
add_test(NAME documents_check_finds_faults COMMAND ${CMAKE_CURRENT_LIST_DIR}/lint_documents_test.sh)
set_tests_properties(documents_check documents_check_finds_faults PROPERTIES
  SKIP_RETURN_CODE 77 LABELS unit TIMEOUT 60)
