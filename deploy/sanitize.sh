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
  tsan) targets=(base_test engine_test session_test membership_test config_test client_test kernels_operations_test) ;;
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

export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1} UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1:halt_on_error=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1:second_deadlock_stack=1}
if (( ${#chosen[@]} != 0 )); then
  exec ctest --test-dir "build/$preset" --output-on-failure --no-tests=error "${chosen[@]}"
fi
# ctest would complain of every test that was not built.
status=0
for target in "${targets[@]}"; do
  log=build/$preset/$target.log
  begin=$SECONDS
  if timeout 900 "build/$preset/bin/$target" >"$log" 2>&1; then
    echo "$target: ok, $((SECONDS - begin)) s"
  else
    echo "$target: FAILED, see $log"
    status=1
  fi
done
exit "$status"
