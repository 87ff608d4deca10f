#!/bin/sh
# Builds the CUDA kernels, their test and their benchmark on a machine with GPUs, and runs all of it in some
# nine minutes on four (by adding up what steps took).
# Usage: tests/gpu/run.sh [--daemon DIR] [full]   (from the root of the sources; output in build/gpu;
# EPD_GPU_STEPS="test suite" runs these steps alone). With --daemon also, under MPS, what pack.sh has put in
# DIR: the GPU faults, the benchmark's suite, graphs, overlap, SMs that change meanwhile, streams,
# calls, conformance, torch through deep_ep; then a part of it without MPS. `full`, some three
# minutes more: also other ways to ask and to wait, and other images of the kernels: the steps with `asserts`
# (it checks ranges) and `sm80` (the code for devices before sm_90) in their names.
# All that the steps have said is in all.log, and what was running 12 s before a step's time was up
# (what_hangs.sh).
set -u
daemon=
if [ "${1:-}" = --daemon ]; then
  daemon=$(cd "${2:?--daemon needs a folder}" && pwd) || exit 2
  shift 2
fi
here=$(cd "$(dirname "$0")/../.." && pwd)
out=${EPD_GPU_BUILD:-$here/build/gpu}
mkdir -p "$out"
export CUDA_MODULE_LOADING=EAGER  # loading a kernel while another waits for it never ends
flags="-std=c++20 -O3 -fmad=false --expt-relaxed-constexpr -I$here/tests -I$here/client/tools -I$here/kernels -I$here/kernels/include -I$here/proto/include"
arch="-gencode=arch=compute_90a,code=sm_90a"
full=${1:-}
images=
for image in asserts sm80; do
  case "$full ${EPD_GPU_STEPS:-}" in "full " | *$image*) images="$images $image" ;; esac
done

# Another image and kernels_test with it. Its objects are there.
build_image() {
  case $1 in
    asserts) define=-DEPD_KERNEL_ASSERTS code=$arch ;;
    sm80) define= code=-gencode=arch=compute_80,code=sm_90 ;;
  esac
  nvcc $flags $define $code --fatbin "$here/kernels/cuda/kernels.cu" -o "$out/image_$1.fatbin" &&
    gcc -c $define -DEPD_CUDA_IMAGE="\"$out/image_$1.fatbin\"" "$here/kernels/cuda/image.S" -o "$out/image_$1.o" &&
    nvcc "$out/test.o" "$out/image_$1.o" "$out/configure.o" "$out/reference.o" -lcuda -o "$out/kernels_test_$1"
}
build() {
  nvcc $flags $arch --fatbin "$here/kernels/cuda/kernels.cu" -o "$out/image.fatbin" &&
    gcc -c -DEPD_CUDA_IMAGE="\"$out/image.fatbin\"" "$here/kernels/cuda/image.S" -o "$out/image.o" &
  a=$!
  nvcc $flags $arch -c "$here/tests/gpu/kernels_bench.cu" -o "$out/bench.o" &
  b=$!
  nvcc $flags -c "$here/tests/gpu/kernels_test.cpp" -o "$out/test.o" &
  c=$!
  nvcc $flags -c "$here/kernels/cuda/configure.cpp" -o "$out/configure.o" &
  e=$!
  nvcc -std=c++20 -O2 -Xcompiler -ffp-contract=off -I"$here/kernels" -I"$here/kernels/include" -I"$here/proto/include" \
    -c "$here/kernels/reference/reference.cpp" -o "$out/reference.o" &
  d=$!
  wait $a && wait $b && wait $c && wait $d && wait $e || return 1
  nvcc "$out/test.o" "$out/image.o" "$out/configure.o" "$out/reference.o" -lcuda -o "$out/kernels_test" &&
    nvcc "$out/bench.o" "$out/image.o" "$out/configure.o" -lcuda -o "$out/kernels_bench"
}

start=$(date +%s)
build || { echo "FAIL build"; exit 1; }
jobs=
for image in $images; do
  build_image "$image" &
  jobs="$jobs $!"
done
for job in $jobs; do
  wait "$job" || { echo "FAIL build of another image"; exit 1; }
done
echo "built in $(($(date +%s) - start)) s"
failed=0
step() {  # step <name> <seconds> <command...>
  name=$1
  limit=$2
  shift 2
  case " ${EPD_GPU_STEPS:-$name} " in *" $name "*) ;; *) return ;; esac
  steps="$steps $name"
  begin=$(date +%s)
  failed_before=$failed
  rm -f "$out/$name.hangs"
  watcher=
  if [ -n "$daemon" ]; then
    (
      trap 'kill $!' TERM
      sleep $((limit - 12)) &
      wait $! && exec "$here/tests/gpu/what_hangs.sh" "$daemon" > "$out/$name.hangs"
    ) 2> /dev/null &
    watcher=$!
  fi
  timeout -s KILL "$limit" "$@" > "$out/$name.log" 2>&1
  rc=$?
  [ -n "$watcher" ] && kill "$watcher" 2> /dev/null
  [ $rc -eq 0 ] && verdict=PASS || { verdict="FAIL (exit $rc)"; failed=1; }
  grep -q "^\[  PASSED  \] 0 tests" "$out/$name.log" && [ $rc -eq 0 ] && verdict="SKIPPED (all tests)"
  [ $rc -ne 77 ] || { verdict=$(grep -m 1 '^SKIPPED' "$out/$name.log"); failed=$failed_before; }
  table="$table$(printf '%-23s %s, %s s' "$name" "$verdict" $(($(date +%s) - begin)))
"
}
table=""
steps=""
step test 60 "$out/kernels_test" "${EPD_GPU_CASES:-100}"
for image in $images; do
  step "kernels_$image" 120 "$out/kernels_test_$image" "${EPD_GPU_CASES:-100}"
  [ "$image" != asserts ] ||
    step asserts_caught 60 sh -c "'$out/kernels_test_asserts' out-of-range | grep 'raw.row is 1048576, allowed: none, or below 4096'"
done
if [ -n "$daemon" ]; then
  EPD_TEST_BIN=$daemon/bin
  EPD_TEST_GPUS=$(nvidia-smi --list-gpus | wc -l)
  export EPD_TEST_BIN EPD_TEST_GPUS
  nvidia-cuda-mps-control -d && sleep 1
  epbench="$daemon/bin/epbench --backend cuda --iters 20"
  # Tests that kill an engine take the clients of its GPU along under MPS.
  kills='*ThatIsKilled*:*ThatAreKilled*:*OutliveTheEngine*:*Engine*'
  step faults 160 "$daemon/bin/gpu_fault_test"
  step suite 110 "$daemon/bin/epbench" suite --backend cuda --iters 12
  decode="$daemon/bin/epbench --backend cuda --sms 32 --tokens 128 --layout expert --payload fp8
    --max-recv-rows 64 --iters 40"
  step decode_graph 40 $decode --wait kernel --graph
  if [ "$full" = full ]; then
    step decode_calls 40 $decode --wait kernel
    step decode_no_stream 40 $decode --no-stream
    step decode_graph_warm 40 $decode --wait kernel --graph --warm-cache
    step decode_graph_memop 40 $decode --graph
  fi
  ways=graph
  [ "$full" = full ] && ways="calls graph"
  for by in $ways; do
    beside="$epbench --wait kernel --overlap --check one"
    [ "$by" = graph ] && beside="$beside --graph"
    step "overlap_4096_$by" 60 $beside --tokens 4096
    step "overlap_128_$by" 60 $beside --tokens 128 --layout expert --payload fp8 --max-recv-rows 64
  done
  # A daemon starts again with each kind of device: one kind after the other.
  step streams 150 "$daemon/bin/operations_test" --gtest_filter="*Streams*/cuda*-$kills"
  step calls 150 "$daemon/bin/operations_test" --gtest_filter="*Calls*/cuda*-$kills"
  step memory 300 "$daemon/bin/operations_test" --gtest_filter="*CallersMemory*/cuda*-$kills"
  step conformance 120 "$daemon/bin/operations_test" --gtest_filter="*RandomCases*/cuda:*Modes*/cuda*-$kills"
  for image in $images; do
    step "conformance_$image" 90 env EPD_TEST_BIN="$daemon/bin/$image" "$daemon/bin/operations_test" \
      --gtest_filter="*RandomCases*/cuda"
  done
  # torch's ranks through deep_ep, where torch is there.
  programs="training decode_graph"
  [ "$full" = full ] && programs="$programs call_cost call_times"
  for program in $programs; do
    step "python_$program" 120 "$here/tests/gpu/python.sh" "$daemon/bin" "$daemon/lib/libepd.so.1" "python_$program.py"
  done
  step python_engines_restart 120 "$here/tests/gpu/python.sh" "$daemon/bin" "$daemon/lib/libepd.so.1" \
    python_engines_die.py --how restart
  echo quit | nvidia-cuda-mps-control > /dev/null
  # Without MPS: the same operations, in turn with the clients' kernels.
  step without_mps 120 "$daemon/bin/operations_test" --gtest_filter="*RandomCases*/cuda"
  step without_mps_graph 60 $decode --graph
  step python_engines_die 120 "$here/tests/gpu/python.sh" "$daemon/bin" "$daemon/lib/libepd.so.1" \
    python_engines_die.py
fi
step bench 60 "$out/kernels_bench" ${1:-}
if command -v compute-sanitizer > /dev/null && [ "${EPD_GPU_SANITIZE:-1}" = 1 ]; then
  step memcheck 60 compute-sanitizer --tool memcheck --error-exitcode 9 "$out/kernels_test" 60 1 256 no-failures
  step racecheck 60 compute-sanitizer --tool racecheck --error-exitcode 9 "$out/kernels_test" 40 1 256 no-failures no-inboxes
fi
for name in $steps; do
  case $name in
    test | kernels_* | memcheck | racecheck | streams | calls | memory | conformance*) lines=12 ;;
    *) lines=+1 ;;
  esac
  echo "== $name"
  tail -n "$lines" "$out/$name.log"
done
echo "== summary"
printf '%s' "$table"
{
  for name in $steps; do
    echo "== $name"
    cat "$out/$name.log"
    [ ! -f "$out/$name.hangs" ] || sed "s/^/$name: /" "$out/$name.hangs"
  done
  echo "== summary"
  printf '%s' "$table"
} > "$out/all.log"
exit $failed
