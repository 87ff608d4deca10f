include(${CMAKE_CURRENT_SOURCE_DIR}/support/support.cmake)
foreach(_name client_death client_kill_points cycles bound engine_death engine_kill_points supervisor_death supervisor_kill_points leaks soak degrade stopped
        log_reader descriptors memory)
  epd_system_test(${_name}_test LABEL fault TIMEOUT 180
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/${_name}_test.cpp ${CMAKE_CURRENT_LIST_DIR}/fault.cpp)
endforeach()
epd_system_test(stalled_test LABEL fault TIMEOUT 180
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/stalled_test.cpp ${CMAKE_CURRENT_LIST_DIR}/hostile.cpp ${CMAKE_CURRENT_LIST_DIR}/fault.cpp)
foreach(_name hostile hostile_close hostile_flood hostile_rounds)
  epd_system_test(${_name}_test LABEL fault TIMEOUT 180
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/${_name}_test.cpp ${CMAKE_CURRENT_LIST_DIR}/hostile_fixture.cpp
            ${CMAKE_CURRENT_LIST_DIR}/hostile.cpp ${CMAKE_CURRENT_LIST_DIR}/bystander.cpp ${CMAKE_CURRENT_LIST_DIR}/fault.cpp)
endforeach()
epd_system_test(hostile_watches_test LABEL fault TIMEOUT 180
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/hostile_watches_test.cpp ${CMAKE_CURRENT_LIST_DIR}/watches.cpp
          ${CMAKE_CURRENT_LIST_DIR}/hostile_fixture.cpp ${CMAKE_CURRENT_LIST_DIR}/hostile.cpp ${CMAKE_CURRENT_LIST_DIR}/bystander.cpp
          ${CMAKE_CURRENT_LIST_DIR}/fault.cpp)
foreach(_name hostile_bells)
  epd_system_test(${_name}_test LABEL fault TIMEOUT 180
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/${_name}_test.cpp ${CMAKE_CURRENT_LIST_DIR}/hostile.cpp
            ${CMAKE_CURRENT_LIST_DIR}/watches.cpp ${CMAKE_CURRENT_LIST_DIR}/fault.cpp)
endforeach()
epd_system_test(gpu_fault_test LABEL fault TIMEOUT 180
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/gpu_fault_test.cpp ${CMAKE_CURRENT_LIST_DIR}/gpu_fault_calls_test.cpp
          ${CMAKE_CURRENT_LIST_DIR}/gpu_fault_leaving_test.cpp ${CMAKE_CURRENT_LIST_DIR}/hostile.cpp
          ${CMAKE_CURRENT_LIST_DIR}/gpu_fault_fixture.cpp ${CMAKE_CURRENT_LIST_DIR}/gpu_fault.cpp ${CMAKE_CURRENT_LIST_DIR}/fault.cpp)
target_compile_definitions(gpu_fault_test PRIVATE
  EPD_FAKE_MPS_CONTROL="${CMAKE_CURRENT_LIST_DIR}/../support/fake_mps_control.sh")
# The same on machines with fewer GPUs: with one, what can be seen there.
epd_system_test_again(gpu_fault_test TwoGpus. LABEL fault TIMEOUT 180 ENVIRONMENT EPD_FAKE_CUDA_DEVICES=set:2)
epd_system_test_again(gpu_fault_test OneGpu. LABEL fault TIMEOUT 180 ENVIRONMENT EPD_FAKE_CUDA_DEVICES=set:1
  FILTER OneGpuFault.*:*between_operations*:*memop*)
find_package(nlohmann_json REQUIRED)
epd_system_test(namespaces_test LABEL fault TIMEOUT 180
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/namespaces_test.cpp ${CMAKE_CURRENT_LIST_DIR}/fault.cpp LIBS nlohmann_json::nlohmann_json)
# Each of the driver's functions that the daemon knows: its table of them says which.
if(EPD_CUDA AND TARGET fake_cuda)
  epd_system_test(driver_fault_test LABEL fault TIMEOUT 180
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/driver_fault_test.cpp ${CMAKE_CURRENT_LIST_DIR}/fault.cpp)
  target_include_directories(driver_fault_test PRIVATE ${PROJECT_SOURCE_DIR}/daemon/device)
  target_include_directories(driver_fault_test SYSTEM PRIVATE ${EPD_FAKE_CUDA_INCLUDE})
endif()
