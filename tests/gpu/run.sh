#!/bin/sh
# Builds the CUDA kernels, their test and their benchmark on a machine with GPUs, and runs all of it within
# about nine minutes. Usage: tests/gpu/run.sh [--daemon DIR] [full]   (from the root of the sources; output in
# build/gpu). With --daemon also, under MPS, the conformance tests, the GPU faults and the benchmark's suite of what
# pack.sh has put in DIR. (Conformance tests that kill an engine are left out: under MPS that takes the clients of its
# GPU along.)
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
flags="-std=c++20 -O3 -fmad=false --expt-relaxed-constexpr -I$here/tests -I$here/kernels -I$here/kernels/include"
arch="-gencode=arch=compute_90a,code=sm_90a"

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
  nvcc -std=c++20 -O2 -Xcompiler -ffp-contract=off -I"$here/kernels" -I"$here/kernels/include" \
    -c "$here/kernels/reference/reference.cpp" -o "$out/reference.o" &
  d=$!
  wait $a && wait $b && wait $c && wait $d && wait $e || return 1
  nvcc "$out/test.o" "$out/image.o" "$out/configure.o" "$out/reference.o" -lcuda -o "$out/kernels_test" &&
    nvcc "$out/bench.o" "$out/image.o" "$out/configure.o" -lcuda -o "$out/kernels_bench"
}

start=$(date +%s)
build || { echo "FAIL build"; exit 1; }
echo "built in $(($(date +%s) - start)) s"
failed=0
step() {  # step <name> <seconds> <command...>
  name=$1
  limit=$2
  shift 2
  begin=$(date +%s)
  timeout -s KILL "$limit" "$@" > "$out/$name.log" 2>&1
  rc=$?
  [ $rc -eq 0 ] && verdict=PASS || { verdict="FAIL (exit $rc)"; failed=1; }
  table="$table$(printf '%-12s %s, %s s' "$name" "$verdict" $(($(date +%s) - begin)))
"
}
table=""
step test 120 "$out/kernels_test" "${EPD_GPU_CASES:-150}"
step bench 120 "$out/kernels_bench" ${1:-}
if command -v compute-sanitizer > /dev/null && [ "${EPD_GPU_SANITIZE:-1}" = 1 ]; then
  step memcheck 90 compute-sanitizer --tool memcheck --error-exitcode 9 "$out/kernels_test" 30 1 256
  step racecheck 90 compute-sanitizer --tool racecheck --error-exitcode 9 "$out/kernels_test" 15 1 256 no-failures
fi
if [ -n "$daemon" ]; then
  EPD_TEST_BIN=$daemon/bin
  EPD_TEST_GPUS=$(nvidia-smi --list-gpus | wc -l)
  export EPD_TEST_BIN EPD_TEST_GPUS
  nvidia-cuda-mps-control -d && sleep 1
  step conformance 150 "$daemon/bin/operations_test" --gtest_filter='*/cuda-*ThatIsKilled*:*ThatAreKilled*'
  step faults 120 "$daemon/bin/gpu_fault_test"
  step suite 120 "$daemon/bin/epbench" suite --backend cuda
  echo quit | nvidia-cuda-mps-control > /dev/null
fi
for name in test memcheck racecheck conformance faults; do
  [ -f "$out/$name.log" ] && { echo "== $name"; tail -25 "$out/$name.log"; }
done
echo "== bench"
cat "$out/bench.log"
[ -f "$out/suite.log" ] && { echo "== suite"; cat "$out/suite.log"; }
echo "== summary"
printf '%s' "$table"
exit $failed
