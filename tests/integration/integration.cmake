include(${CMAKE_CURRENT_SOURCE_DIR}/support/support.cmake)
find_package(nlohmann_json REQUIRED)
epd_system_test(attach_test LABEL integration TIMEOUT 120 SOURCES ${CMAKE_CURRENT_LIST_DIR}/attach_test.cpp)
epd_system_test(requests_test LABEL integration TIMEOUT 120 SOURCES ${CMAKE_CURRENT_LIST_DIR}/requests_test.cpp)
epd_system_test(operate_test LABEL integration TIMEOUT 120 SOURCES ${CMAKE_CURRENT_LIST_DIR}/operate_test.cpp
  LIBS nlohmann_json::nlohmann_json)
epd_system_test(access_test LABEL integration TIMEOUT 120 SOURCES ${CMAKE_CURRENT_LIST_DIR}/access_test.cpp)
epd_system_test(operator_test LABEL integration TIMEOUT 120
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/operator_test.cpp ${CMAKE_CURRENT_LIST_DIR}/operator_evict_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/operator_size_test.cpp ${CMAKE_CURRENT_LIST_DIR}/operator_config_test.cpp
  LIBS nlohmann_json::nlohmann_json)
epd_system_test(gpus_test LABEL integration TIMEOUT 120 SOURCES ${CMAKE_CURRENT_LIST_DIR}/gpus_test.cpp
  LIBS nlohmann_json::nlohmann_json)
epd_system_test(operator_status_test LABEL integration TIMEOUT 120
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/operator_status_test.cpp)
epd_system_test(operator_raw_test LABEL integration TIMEOUT 120
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/operator_raw_test.cpp LIBS epd_control_proto)
