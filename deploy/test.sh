#!/usr/bin/env bash
# Builds epd and runs every test that can run here. See --help.
set -euo pipefail

usage() {
  cat <<'END'
Usage: deploy/test.sh [--help] [--all] [--ci] [OPTIONS OF ctest]

Installs missing Debian packages, builds everything (preset dev, in build/dev) and runs the tests,
three at a time. A failed test's output is shown.

  --all  also the tests with label nightly: floods, soaks, packages, other images of the kernels
  --ci   the whole build's output, and a JUnit report in build/dev/tests.xml

Other options go to ctest, for example:
  deploy/test.sh -L unit         unit tests only
  deploy/test.sh -L gpu          tests on GPUs; skipped, and shown as that, where there is none
  deploy/test.sh -R epbench -V   tests with that name, all their output
END
}

all=
ci=
ctest_options=()
for argument in "$@"; do
  case $argument in
    --help | -h) usage; exit 0 ;;
    --all) all=1 ;;
    --ci) ci=1 ;;
    *) ctest_options+=("$argument") ;;
  esac
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=deploy/dependencies.sh
source "$root/deploy/dependencies.sh"
EPD_PACKAGES+=(python3-torch)  # of the tests of client/deep_ep and epd.torch alone

install_dependencies
cd "$root"
targets=(--target all)
if [[ -n $all ]]; then
  targets+=(nightly)
else
  ctest_options+=(--label-exclude nightly)
fi
if [[ -n $ci ]]; then
  cmake --preset dev
  cmake --build build/dev --parallel "$(build_jobs)" "${targets[@]}"
  ctest_options+=(--output-junit tests.xml)
else
  quietly "Configuring" cmake --preset dev
  quietly "Building" cmake --build build/dev --parallel "$(build_jobs)" "${targets[@]}"
fi
exec ctest --test-dir build/dev --parallel 3 --output-on-failure --no-tests=error "${ctest_options[@]}"
