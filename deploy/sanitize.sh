#!/usr/bin/env bash
# Builds and runs the tests with sanitizers. See --help.
set -euo pipefail

usage() {
  cat <<'END'
Usage: deploy/sanitize.sh [--help] asan|tsan [OPTIONS OF ctest]

asan  AddressSanitizer, LeakSanitizer and UBSan: unit, conformance, fault and fuzz tests, and with them the
      daemon, its engines and the client library in every process (preset asan, build/asan)
tsan  ThreadSanitizer: the unit tests of everything that runs threads, without gRPC, whose own library is not
      instrumented (preset tsan, build/tsan). Between processes it sees nothing: there the models of
      proto/model speak.

What any process reports lies in build/PRESET/reports afterwards, and is a finding even where its test passed: a
test that kills engines forgives an engine that dies by itself.

Other options go to ctest and replace asan's choice of tests, for example:
  deploy/sanitize.sh asan -R EngineDeath

Not part of CI: building takes minutes, tests run several times slower. Exit status: 0 nothing found.
END
}

preset=${1:-}
targets=()
chosen=()
case $preset in
  asan) chosen=(-L 'unit|conformance|fault|fuzz') ;;
  tsan) targets=(base_test engine_test session_test membership_test supervisor_test client_test kernels_host_test) ;;
  --help | -h) usage; exit 0 ;;
  *) usage >&2; exit 2 ;;
esac
shift
if (( $# != 0 )); then chosen=("$@"); fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/dependencies.sh
source deploy/dependencies.sh
install_dependencies
quietly "Configuring" cmake --preset "$preset"
quietly "Building" cmake --build "build/$preset" --parallel "$(build_jobs)" ${targets:+--target "${targets[@]}"}

reports=$PWD/build/$preset/reports
rm -rf "$reports"
install --directory --mode 1777 "$reports"  # some tests run clients of other users
common=log_path=$reports/report:log_exe_name=1
# LeakSanitizer takes what lies before a library's thread-local block for its size, and dies of reading there.
export ASAN_OPTIONS=$common:detect_leaks=1:intercept_tls_get_addr=0:${ASAN_OPTIONS:-}
export UBSAN_OPTIONS=$common:print_stacktrace=1:halt_on_error=1:${UBSAN_OPTIONS:-}
# glibc frees the thread-local memory of threads that have ended under a lock of its own.
printf 'race:dl_deallocate_tls\n' >"build/$preset/suppressions"
export TSAN_OPTIONS=$common:suppressions=$PWD/build/$preset/suppressions:halt_on_error=1:second_deadlock_stack=1:${TSAN_OPTIONS:-}
status=0
if (( ${#chosen[@]} != 0 )); then
  ctest --test-dir "build/$preset" --output-on-failure --no-tests=error "${chosen[@]}" || status=1
else
  # ctest would complain of every test that was not built.
  for target in "${targets[@]}"; do
    log=build/$preset/$target.log
    begin=$SECONDS
    # That one needs CUDA devices: the fake driver's.
    environment=()
    [[ $target == engine_test ]] && environment=("LD_LIBRARY_PATH=$PWD/build/$preset/lib/fake_cuda")
    if env "${environment[@]}" timeout 900 "build/$preset/bin/$target" >"$log" 2>&1; then
      echo "$target: ok, $((SECONDS - begin)) s"
    else
      echo "$target: FAILED, see $log"
      status=1
    fi
  done
fi
found=$(find "$reports" -type f | wc -l)
if (( found != 0 )); then
  echo "$found reports in $reports; what they begin with:"
  grep -hE -m 1 'ERROR|WARNING|runtime error' -r "$reports" | sed 's/^==[0-9]*==//' | sort | uniq -c
  status=1
fi
exit "$status"
