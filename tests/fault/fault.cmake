include(${CMAKE_CURRENT_SOURCE_DIR}/support/support.cmake)
find_package(nlohmann_json REQUIRED)
set(_sources)
foreach(_name client_death_test client_kill_points_test cycles_test engine_death_test engine_kill_points_test
        supervisor_death_test supervisor_kill_points_test leaks_test soak_test degrade_test stopped_test log_reader_test
        descriptors_test memory_test namespaces_test stalled_test hostile_test hostile_close_test hostile_flood_test
        hostile_rounds_test hostile_watches_test hostile_bells_test hostile_fixture hostile bystander watches fault)
  list(APPEND _sources ${CMAKE_CURRENT_LIST_DIR}/${_name}.cpp)
endforeach()
epd_system_test(fault_test LABEL fault NIGHTLY Cycles HostileFlood HostileWatches Soak SOURCES ${_sources} LIBS nlohmann_json::nlohmann_json)

# True GPUs run these programs too (gpu/gpu.cmake).
epd_system_test(gpu_fault_test LABEL fault
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/gpu_fault_test.cpp ${CMAKE_CURRENT_LIST_DIR}/gpu_fault_calls_test.cpp
          ${CMAKE_CURRENT_LIST_DIR}/gpu_fault_leaving_test.cpp ${CMAKE_CURRENT_LIST_DIR}/gpu_fault_memory_test.cpp
          ${CMAKE_CURRENT_LIST_DIR}/hostile.cpp
          ${CMAKE_CURRENT_LIST_DIR}/gpu_fault_fixture.cpp ${CMAKE_CURRENT_LIST_DIR}/gpu_fault.cpp ${CMAKE_CURRENT_LIST_DIR}/fault.cpp)
target_compile_definitions(gpu_fault_test PRIVATE
  EPD_FAKE_MPS_CONTROL="${CMAKE_CURRENT_LIST_DIR}/../support/fake_mps_control.sh")
# The same on machines with fewer GPUs: with one, what can be seen there.
epd_system_suites(gpu_fault_test PREFIX TwoGpus. LABEL fault ENVIRONMENT EPD_FAKE_CUDA_DEVICES=set:2
  FILTER GpuFault.*:*GpuFaultCalls*)
epd_system_suites(gpu_fault_test PREFIX OneGpu. LABEL fault ENVIRONMENT EPD_FAKE_CUDA_DEVICES=set:1
  FILTER OneGpuFault.*:*between_operations*:*memop*)
# Each of the driver's functions that the daemon knows: its table of them says which.
if(EPD_CUDA AND TARGET fake_cuda)
  target_sources(fault_test PRIVATE ${CMAKE_CURRENT_LIST_DIR}/driver_fault_test.cpp)
  target_include_directories(fault_test PRIVATE ${PROJECT_SOURCE_DIR}/daemon/device)
  target_include_directories(fault_test SYSTEM PRIVATE ${EPD_FAKE_CUDA_INCLUDE})
endif()
