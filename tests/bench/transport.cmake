add_executable(transport_bench ${CMAKE_CURRENT_LIST_DIR}/transport_bench.cpp)
target_compile_options(transport_bench PRIVATE -O2)
target_link_libraries(transport_bench PRIVATE epd_transport CLI11::CLI11 epd_options)
