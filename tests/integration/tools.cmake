# Small runs of the tools against a daemon of their own: they end well, and what they measured was right.
add_test(NAME tools.epbench_both_bf16
  COMMAND epbench --epd $<TARGET_FILE:epd> --ranks 4 --op both --tokens 33 --hidden 512 --iters 6 --warmup 2 --check all --json)
add_test(NAME tools.epbench_dispatch_fp8_zipf
  COMMAND epbench --epd $<TARGET_FILE:epd> --ranks 2 --op dispatch --payload fp8 --tokens 64 --hidden 1024 --routing zipf --iters 6 --check all)
add_test(NAME tools.epbench_combine_weighted_one_expert
  COMMAND epbench --epd $<TARGET_FILE:epd> --ranks 3 --experts 12 --topk 3 --op combine --weighted --tokens 20 --hidden 256 --routing one-expert --iters 6 --check all)
add_test(NAME tools.epbench_packed_opaque_cached
  COMMAND epbench --epd $<TARGET_FILE:epd> --ranks 3 --experts 12 --topk 4 --op both --layout packed --payload opaque --opaque-bytes 1040
          --alignment 16 --zero-padding --cached --biases 2 --return-weights --tokens 50 --hidden 256 --routing zipf --iters 6 --check all)
add_test(NAME tools.epbench_expert_given
  COMMAND epbench --epd $<TARGET_FILE:epd> --ranks 4 --experts 16 --op both --layout expert --payload fp8-given --scales ue8m0 --scale-layout column_major
          --mark-unused --weighted --max-recv-rows 100 --priority 3 --tokens 40 --hidden 640 --iters 6 --check all)
add_test(NAME tools.epbench_noop
  COMMAND epbench --epd $<TARGET_FILE:epd> --ranks 1 --op noop --iters 3)
# As in README: the sockets of a daemon that ran before are still in the environment.
add_test(NAME tools.epbench_beside_a_socket_in_the_environment COMMAND epbench --epd $<TARGET_FILE:epd> --ranks 2 --op noop --iters 3)
set_tests_properties(tools.epbench_beside_a_socket_in_the_environment PROPERTIES
  ENVIRONMENT "EPD_SOCKET=/tmp/epd-of-others/epd.sock;EPD_CONTROL_SOCKET=/tmp/epd-of-others/control.sock")
add_test(NAME tools.epbench_attach COMMAND epbench attach --epd $<TARGET_FILE:epd> --rounds 10)
add_test(NAME tools.epbench_reap COMMAND epbench reap --epd $<TARGET_FILE:epd> --rounds 5)
add_test(NAME tools.demo
  COMMAND epd-moe-demo --epd $<TARGET_FILE:epd> --layers 2 --steps 1 --tokens 16 --hidden 512 --expert-rank 4
          --dump-routing ${CMAKE_CURRENT_BINARY_DIR}/demo-routing.jsonl)
set_tests_properties(tools.demo PROPERTIES FIXTURES_SETUP demo_routing)
add_test(NAME tools.epbench_replays_the_demo
  COMMAND epbench --epd $<TARGET_FILE:epd> --ranks 4 --op both --tokens 16 --hidden 512 --iters 4 --warmup 0 --check all
          --routing ${CMAKE_CURRENT_BINARY_DIR}/demo-routing.jsonl)
set_tests_properties(tools.epbench_replays_the_demo PROPERTIES FIXTURES_REQUIRED demo_routing)
set_tests_properties(tools.epbench_both_bf16 tools.epbench_dispatch_fp8_zipf tools.epbench_combine_weighted_one_expert
  tools.epbench_packed_opaque_cached tools.epbench_expert_given tools.epbench_noop tools.epbench_beside_a_socket_in_the_environment tools.epbench_attach tools.epbench_reap tools.demo tools.epbench_replays_the_demo
  PROPERTIES LABELS integration TIMEOUT 120)

# The same on CUDA devices, with the fake driver.
include(${CMAKE_CURRENT_LIST_DIR}/../support/fake_cuda.cmake)
if(EPD_CUDA AND EPD_FAKE_CUDA)
  set(_epbench_cuda epbench --epd $<TARGET_FILE:epd> --backend cuda --warm-cache --iters 4 --warmup 1)
  add_test(NAME tools.epbench_cuda_both
    COMMAND ${_epbench_cuda} --experts 16 --ranks 4 --op both --tokens 64 --hidden 1024 --check all --json)
  add_test(NAME tools.epbench_cuda_expert_zipf_cached
    COMMAND ${_epbench_cuda} --ranks 3 --experts 12 --topk 3 --op both --layout expert --payload fp8 --scales ue8m0 --cached --weighted
            --biases 1 --return-weights --mark-unused --tokens 33 --hidden 640 --routing zipf --check all)
  add_test(NAME tools.epbench_cuda_checks_a_window
    COMMAND ${_epbench_cuda} --experts 16 --ranks 2 --op dispatch --payload fp8 --scale-layout column_major --tokens 600 --hidden 4096 --check one)
  set_tests_properties(tools.epbench_cuda_checks_a_window PROPERTIES PASS_REGULAR_EXPRESSION "bit-exact \\(2, 1024 columns\\)")
  add_test(NAME tools.epbench_cuda_noop_shared_devices COMMAND ${_epbench_cuda} --ranks 3 --experts 12 --op noop)
  add_test(NAME tools.epbench_cuda_waits_by_kernel
    COMMAND ${_epbench_cuda} --wait kernel --experts 16 --ranks 2 --op both --tokens 16 --hidden 512 --check all)
  set_tests_properties(tools.epbench_cuda_waits_by_kernel PROPERTIES
    PASS_REGULAR_EXPRESSION "wait by kernel.*all ranks go on together.*bit-exact.*bit-exact" FAIL_REGULAR_EXPRESSION WRONG)
  add_test(NAME tools.epbench_cuda_waits_by_event
    COMMAND ${_epbench_cuda} --wait event --experts 16 --ranks 2 --op both --tokens 16 --hidden 512 --check all)
  set_tests_properties(tools.epbench_cuda_waits_by_event PROPERTIES
    PASS_REGULAR_EXPRESSION "wait by event.*all ranks go on together.*bit-exact.*bit-exact" FAIL_REGULAR_EXPRESSION WRONG)
  # Without MPS the same kernels carry the same calls out.
  add_test(NAME tools.epbench_cuda_without_mps
    COMMAND ${_epbench_cuda} --graph --wait kernel --experts 16 --ranks 2 --op both --tokens 16 --hidden 512 --check all)
  set_tests_properties(tools.epbench_cuda_without_mps PROPERTIES
    PASS_REGULAR_EXPRESSION "wait by kernel graph.*all ranks go on together.*bit-exact.*bit-exact" FAIL_REGULAR_EXPRESSION WRONG)
  set(_no_stream ${_epbench_cuda} --no-stream --experts 16 --ranks 2 --op both --tokens 16 --hidden 512 --check all)
  add_test(NAME tools.epbench_cuda_no_stream COMMAND ${_no_stream} --cached)
  set_tests_properties(tools.epbench_cuda_no_stream PROPERTIES
    PASS_REGULAR_EXPRESSION "wait by no stream: p50 [1-9].*[1-9][0-9]* \\([0-9]+ %\\) +bit-exact.*bit-exact" FAIL_REGULAR_EXPRESSION WRONG)
  # Twice the comparisons of a run without: 4 iterations of 2 ranks, by themselves and beside the GEMM.
  set(_overlap ${_epbench_cuda} --overlap --experts 16 --ranks 2 --op both --tokens 16 --hidden 512 --check all)
  add_test(NAME tools.epbench_cuda_overlap COMMAND ${_overlap} --cached --layout expert --payload fp8)
  add_test(NAME tools.epbench_cuda_overlap_by_kernel COMMAND ${_overlap} --wait kernel)
  add_test(NAME tools.epbench_cuda_overlap_graph COMMAND ${_overlap} --graph --layout packed)
  add_test(NAME tools.epbench_cuda_overlap_graph_by_kernel COMMAND ${_overlap} --graph --wait kernel)
  set(_overlaps tools.epbench_cuda_overlap tools.epbench_cuda_overlap_by_kernel
    tools.epbench_cuda_overlap_graph tools.epbench_cuda_overlap_graph_by_kernel)
  set(_checked "bit-exact \\(16\\)")
  set(_times "bf16[a-z ]* +[1-9][0-9.]* +[0-9.]+ +[1-9][0-9.]* +[1-9]")
  set_tests_properties(${_overlaps} PROPERTIES FAIL_REGULAR_EXPRESSION WRONG
    PASS_REGULAR_EXPRESSION "${_checked}.*${_checked}.*beside each other.*${_times}")
  add_test(NAME tools.epbench_cuda_suite COMMAND epbench suite --epd $<TARGET_FILE:epd> --backend cuda --small --warm-cache --iters 3)
  # The output is that of runs with 4 ranks and with 2, in turn.
  set_tests_properties(tools.epbench_cuda_suite PROPERTIES
    PASS_REGULAR_EXPRESSION "caches not flushed.*Empty pair of events.*less events.*kernel.*kernel graph.*no stream"
    FAIL_REGULAR_EXPRESSION "WRONG|unchecked")  # "n/a": load made a difference negative
  set(_layer epbench layer --epd $<TARGET_FILE:epd> --hidden 512 --layers 3 --iters 2 --check all)
  add_test(NAME tools.epbench_cuda_layer_decode COMMAND ${_layer} --shape decode --context 1024)
  add_test(NAME tools.epbench_cuda_layer_prefill COMMAND ${_layer} --shape prefill --tokens 256 --wait kernel)
  add_test(NAME tools.epbench_cuda_layer_micro_batches
    COMMAND ${_layer} --shape decode --context 512 --micro-batches 2 --ranks 2)
  add_test(NAME tools.epbench_layer_refuses_tokens COMMAND epbench layer --micro-batches 2 --tokens 128)
  set(_layers tools.epbench_cuda_layer_decode tools.epbench_cuda_layer_prefill tools.epbench_cuda_layer_micro_batches)
  set_tests_properties(${_layers} PROPERTIES PASS_REGULAR_EXPRESSION "bit-exact \\([48]" FAIL_REGULAR_EXPRESSION WRONG)
  set_tests_properties(tools.epbench_cuda_layer_micro_batches PROPERTIES PASS_REGULAR_EXPRESSION "2 micro-batches, 2 ranks.*bit-exact \\(16\\)")
  set_tests_properties(tools.epbench_layer_refuses_tokens PROPERTIES PASS_REGULAR_EXPRESSION "tokens is 128. allowed: multiples of 256")
  add_test(NAME tools.epbench_cuda_without_devices COMMAND epbench --backend cuda)
  set_tests_properties(tools.epbench_cuda_without_devices PROPERTIES PASS_REGULAR_EXPRESSION "CUDA_ERROR_NO_DEVICE")
  set(_fake LD_LIBRARY_PATH=$<TARGET_FILE_DIR:fake_cuda>)
  set_tests_properties(tools.epbench_cuda_both tools.epbench_cuda_expert_zipf_cached tools.epbench_cuda_checks_a_window
    ${_overlaps} tools.epbench_cuda_no_stream
    tools.epbench_cuda_waits_by_kernel tools.epbench_cuda_waits_by_event tools.epbench_cuda_suite
    ${_layers} tools.epbench_layer_refuses_tokens PROPERTIES ENVIRONMENT "${_fake}")
  set_tests_properties(tools.epbench_cuda_noop_shared_devices PROPERTIES ENVIRONMENT "${_fake};EPD_FAKE_CUDA_DEVICES=2")
  set_tests_properties(tools.epbench_cuda_without_mps PROPERTIES ENVIRONMENT "${_fake};EPD_FAKE_CUDA_MPS=0")
  set_tests_properties(tools.epbench_cuda_without_devices PROPERTIES ENVIRONMENT "${_fake};EPD_FAKE_CUDA_DEVICES=0")
  set_tests_properties(tools.epbench_cuda_both tools.epbench_cuda_expert_zipf_cached tools.epbench_cuda_checks_a_window
    tools.epbench_cuda_waits_by_kernel tools.epbench_cuda_waits_by_event tools.epbench_cuda_noop_shared_devices tools.epbench_cuda_suite
    ${_overlaps} tools.epbench_cuda_no_stream
    ${_layers} tools.epbench_layer_refuses_tokens
    tools.epbench_cuda_without_devices tools.epbench_cuda_without_mps
    PROPERTIES LABELS integration TIMEOUT 300)
endif()

# Unsupported options are refused with what is allowed, before anything starts. A semicolon would part a
# PASS_REGULAR_EXPRESSION into two, and either would do. Hence the dots.
add_test(NAME tools.epbench_refuses_layout COMMAND epbench --layout tall)
add_test(NAME tools.epbench_refuses_backend COMMAND epbench --backend tpu)
add_test(NAME tools.epbench_refuses_wait COMMAND epbench --backend cuda --wait long)
add_test(NAME tools.epbench_refuses_wait_on_host COMMAND epbench --wait kernel)
add_test(NAME tools.epbench_refuses_ranks_of_the_host_suite COMMAND epbench suite --ranks 2)
add_test(NAME tools.epbench_refuses_hidden COMMAND epbench --hidden 100)
add_test(NAME tools.epbench_refuses_missing_routing_file COMMAND epbench --epd $<TARGET_FILE:epd> --routing /no/such/file)
add_test(NAME tools.epbench_refuses_negative_tokens COMMAND epbench --tokens -1)
add_test(NAME tools.epbench_refuses_a_large_seed COMMAND epbench --seed 99999999999999999999)
add_test(NAME tools.demo_refuses_experts COMMAND epd-moe-demo --experts 100)
set_tests_properties(tools.epbench_refuses_layout PROPERTIES PASS_REGULAR_EXPRESSION "layout 'tall' is not served. allowed: compact, packed, expert")
set_tests_properties(tools.epbench_refuses_backend PROPERTIES PASS_REGULAR_EXPRESSION "backend 'tpu' is not served. allowed: host, cuda")
set_tests_properties(tools.epbench_refuses_wait PROPERTIES PASS_REGULAR_EXPRESSION "wait 'long' is not served. allowed: memop, kernel")
set_tests_properties(tools.epbench_refuses_wait_on_host PROPERTIES PASS_REGULAR_EXPRESSION "about streams. allowed: with backend cuda")
set_tests_properties(tools.epbench_refuses_ranks_of_the_host_suite PROPERTIES PASS_REGULAR_EXPRESSION "are 1, 2 and 4. allowed: with backend cuda")
set_tests_properties(tools.epbench_refuses_hidden PROPERTIES PASS_REGULAR_EXPRESSION "hidden is 100. allowed: multiples of 8, 8 .. 16384")
set_tests_properties(tools.epbench_refuses_missing_routing_file PROPERTIES PASS_REGULAR_EXPRESSION "routing '/no/such/file' is not a file")
set_tests_properties(tools.epbench_refuses_negative_tokens PROPERTIES PASS_REGULAR_EXPRESSION "--tokens: \"-1\" is refused. allowed: 0..65536")
set_tests_properties(tools.epbench_refuses_a_large_seed PROPERTIES PASS_REGULAR_EXPRESSION "99999999999999999999\" is refused. allowed: 0..18446744073709551615")
set_tests_properties(tools.demo_refuses_experts PROPERTIES PASS_REGULAR_EXPRESSION "experts is 100. the group-limited gate allows multiples of 8")
set_tests_properties(tools.epbench_refuses_layout tools.epbench_refuses_backend tools.epbench_refuses_wait tools.epbench_refuses_wait_on_host tools.epbench_refuses_hidden
  tools.epbench_refuses_ranks_of_the_host_suite
  tools.epbench_refuses_negative_tokens tools.epbench_refuses_a_large_seed
  tools.epbench_refuses_missing_routing_file tools.demo_refuses_experts PROPERTIES LABELS integration TIMEOUT 30)
