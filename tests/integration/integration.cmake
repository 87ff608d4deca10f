include_guard(GLOBAL)
include(${CMAKE_CURRENT_SOURCE_DIR}/support/support.cmake)
find_package(nlohmann_json REQUIRED)
set(_sources)
foreach(_name attach requests operate access operator operator_evict operator_size operator_config operator_status operator_raw
        gpus examples)
  list(APPEND _sources ${CMAKE_CURRENT_LIST_DIR}/${_name}_test.cpp)
endforeach()
epd_system_test(integration_test LABEL integration SOURCES ${_sources} LIBS nlohmann_json::nlohmann_json epd_control_proto)
