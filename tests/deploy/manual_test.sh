#!/usr/bin/env bash
# manual_test.sh BUILD_DIR: every option and command has its place in the manual pages, and man(1) reads them without a
# warning. Exit status: 0 passed, 1 failed, 77 skipped because man is not installed.
set -euo pipefail

build=$1
pages=$build/deploy/manual
fail() { echo "FAILED: $1" >&2; exit 1; }

command -v man >/dev/null || { echo "skipped: man is not installed"; exit 77; }
work=$(mktemp -d "${TMPDIR:-/tmp}/epd-manual-test-XXXXXX")
trap 'rm -rf "$work"' EXIT
for page in epd.8 epctl.1 epbench.1 epd-moe-demo.1 epd.toml.5; do
  warnings=$(LC_ALL=C.UTF-8 MANWIDTH=100 man --warnings -E UTF-8 -l -Tutf8 -Z "$pages/$page" 2>&1 >/dev/null)
  [[ -z $warnings ]] || fail "$page: $warnings"
  MANWIDTH=100 LC_ALL=C.UTF-8 man -l "$pages/$page" | col -b >"$work/$page"
  grep -q '^SYNOPSIS' "$work/$page" || fail "$page has no synopsis"
  if grep --fixed-strings "$build" "$pages/$page"; then fail "$page has a path of this machine"; fi
done

"$build/bin/epd" check-config --config /dev/null | sed 's/ .*//' | while read -r option; do
  grep -q -- "--$option" "$work/epd.8" || fail "epd(8) lacks --$option"
  grep -qx " *${option#*.}\( .*\)\?" "$work/epd.toml.5" || fail "epd.toml(5) lacks $option"
  grep -qF "[${option%%.*}]" "$work/epd.toml.5" || fail "epd.toml(5) lacks [${option%%.*}]"
done
for command in status op set evict reload health drain doctor size; do
  grep -qx "   $command" "$work/epctl.1" || fail "epctl(1) does not explain $command"
done
for option in tokens ranks-per-node rounds; do
  grep -q -- "--$option" "$work/epbench.1" || fail "epbench(1) lacks --$option"
done
for option in layers steps; do
  grep -q -- "--$option" "$work/epd-moe-demo.1" || fail "epd-moe-demo(1) lacks --$option"
done
echo "5 pages, $(cat "$work"/* | wc -l) lines"
