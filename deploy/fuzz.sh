#!/usr/bin/env bash
# Runs the fuzz harnesses for longer than the tests do. See --help.
set -euo pipefail

usage() {
  cat <<'END'
Usage: deploy/fuzz.sh [--help] [--minimise] [SECONDS_PER_HARNESS] [NAME...]

Builds the libFuzzer harnesses (clang, AddressSanitizer, UBSan; preset fuzz, in build/fuzz) and runs each of
NAME (call, attach, control, config, far, cluster, cluster_wire; default all) for SECONDS_PER_HARNESS
(default 60), starting from tests/fuzz/corpus/NAME. Inputs that reach new code go to build/fuzz/corpus/NAME, crashes and the harness's
output to build/fuzz/runs. A crash is repeated with: build/fuzz/bin/NAME_fuzz FILE

  --minimise   afterwards writes to build/fuzz/minimal/NAME a small set of inputs that reaches all that is
               reached, to choose from for tests/fuzz/corpus/NAME (keep those that are short)

Needs clang. Exit status: 0 nothing found, 1 a crash, hang or leak, 77 clang is missing.
END
}

minimise=
seconds=60
names=()
for argument in "$@"; do
  case $argument in
    --help | -h) usage; exit 0 ;;
    --minimise) minimise=1 ;;
    *[!0-9]*) names+=("$argument") ;;
    *) seconds=$argument ;;
  esac
done
if (( ${#names[@]} == 0 )); then names=(call attach control config far cluster cluster_wire); fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/dependencies.sh
source deploy/dependencies.sh
for name in "${names[@]}"; do
  if [[ ! -f tests/fuzz/${name}_fuzz.cpp ]]; then
    echo "error: no harness \"$name\"; allowed: call, attach, control, config, far, cluster, cluster_wire" >&2
    exit 2
  fi
done
if ! command -v clang++ >/dev/null; then echo "skipped: clang++ is not installed"; exit 77; fi

quietly "Configuring" cmake --preset fuzz
quietly "Building" cmake --build build/fuzz --parallel "$(build_jobs)" --target "${names[@]/%/_fuzz}"

runs=build/fuzz/runs
mkdir -p "$runs"
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1} UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1:halt_on_error=1}
status=0
printf '%-12s %10s %10s %10s %8s %s\n' harness runs coverage features corpus result
for name in "${names[@]}"; do
  found=build/fuzz/corpus/$name
  log=$runs/$name.log
  mkdir -p "$found"
  result=ok
  build/fuzz/bin/"${name}_fuzz" -max_total_time="$seconds" -timeout=60 -rss_limit_mb=4096 -print_final_stats=1 \
    -artifact_prefix="$runs/$name-" "$found" "tests/fuzz/corpus/$name" >"$log" 2>&1 || result="FAILED, see $log"
  if [[ $result != ok ]]; then status=1; fi
  executed=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  last=$(grep -E '^#[0-9]+' "$log" | tail -n 1 || true)
  coverage=$(sed -n 's/.* cov: \([0-9]*\).*/\1/p' <<<"$last")
  features=$(sed -n 's/.* ft: \([0-9]*\).*/\1/p' <<<"$last")
  printf '%-12s %10s %10s %10s %8s %s\n' "$name" "${executed:-?}" "${coverage:-?}" "${features:-?}" \
    "$(find "$found" -type f | wc -l)" "$result"
  if [[ -n $minimise && $result == ok ]]; then
    minimal=build/fuzz/minimal/$name
    rm -rf "$minimal"
    mkdir -p "$minimal"
    build/fuzz/bin/"${name}_fuzz" -set_cover_merge=1 "$minimal" "tests/fuzz/corpus/$name" "$found" \
      >"$runs/$name-merge.log" 2>&1
  fi
done
exit "$status"
