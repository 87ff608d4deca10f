find_package(benchmark REQUIRED)
add_executable(kernels_bench ${CMAKE_CURRENT_LIST_DIR}/kernels_bench.cpp)
target_include_directories(kernels_bench PRIVATE ${PROJECT_SOURCE_DIR}/kernels)
target_link_libraries(kernels_bench PRIVATE epd_kernels epd_options benchmark::benchmark_main)
