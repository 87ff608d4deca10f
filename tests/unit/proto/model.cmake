# The rings, the doorbells and operations between nodes, model-checked: proto/model. Shown as skipped where spin is not installed.
foreach(_model host peers calls bell together far)
  add_test(NAME model.${_model} COMMAND ${PROJECT_SOURCE_DIR}/proto/model/check.sh ${_model})
  set_tests_properties(model.${_model} PROPERTIES SKIP_RETURN_CODE 77 LABELS unit TIMEOUT 300 COST 5)
endforeach()
