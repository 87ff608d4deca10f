#!/usr/bin/env bash
# Holds the sources against .clang-format and .clang-tidy, and the documents against their rules. See --help.
set -euo pipefail

usage() {
  cat <<'END'
Usage: deploy/lint.sh [--help] [--documents] [--format-only] [--fix] [FILE...]

Checks formatting (clang-format) and runs clang-tidy with the repository's configurations over FILE...,
default all sources that git knows; then also whether the shells can read their scripts, the lines, links
and words of all documents (deploy/lint_documents.py; the words are in proto/GLOSSARY.md), and that signals
are sent by send_signal() alone: kill(-1) ends every process of a machine. clang-tidy needs a configured
build/dev and takes a few minutes.

  --documents     the documents only
  --format-only   no clang-tidy
  --fix           formats in place instead of complaining

Exit status: 0 clean, 1 findings, 77 a tool is missing.
END
}

documents_only=
format_only=
fix=
files=()
for argument in "$@"; do
  case $argument in
    --help | -h) usage; exit 0 ;;
    --documents) documents_only=1 ;;
    --format-only) format_only=1 ;;
    --fix) fix=1 ;;
    *) files+=("$argument") ;;
  esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
check_documents() {
  if ! command -v python3 >/dev/null; then echo "skipped: python3 is not installed"; exit 77; fi
  deploy/lint_documents.py
  proto/fields.py --check
}
if [[ -n $documents_only ]]; then check_documents; exit 0; fi
if (( ${#files[@]} == 0 )); then
  check_documents
  mapfile -t files < <(git ls-files --cached --others --exclude-standard '*.c' '*.cpp' '*.h' '*.hpp' '*.cu' '*.cuh')
  for script in .ci/run $(git ls-files --cached --others --exclude-standard '*.sh'); do
    shell=bash
    if [[ $(head -n 1 "$script") == '#!/bin/sh' ]]; then shell=sh; fi
    "$shell" -n "$script"
  done
  if git grep -nE '(^|[^[:alnum:]_])::kill\(' -- '*.cpp' '*.h' ':!proto/common/include/common/signal.h'; then
    echo "error: the lines above call kill(2); allowed: send_signal() of common/signal.h" >&2
    exit 1
  fi
fi

if ! command -v clang-format >/dev/null; then echo "skipped: clang-format is not installed"; exit 77; fi
if [[ -n $fix ]]; then
  clang-format -i "${files[@]}"
else
  clang-format --dry-run -Werror "${files[@]}"
fi
if [[ -n $format_only ]]; then exit 0; fi

if ! command -v clang-tidy >/dev/null; then echo "skipped: clang-tidy is not installed"; exit 77; fi
if [[ ! -f build/dev/compile_commands.json ]]; then
  echo "error: build/dev is not configured: run cmake --preset dev" >&2
  exit 1
fi
# Without the generated headers clang-tidy reads half of what includes them and complains of the rest.
cmake --build build/dev --target epd_control_proto >/dev/null
# clang reads none of GCC's precompiled headers.
database=$(mktemp -d)
trap 'rm -rf "$database"' EXIT
sed 's| -Winvalid-pch -include [^ ]*/cmake_pch.hxx||' build/dev/compile_commands.json >"$database/compile_commands.json"
# build/dev builds neither the packaged example nor what nvcc builds by itself, and has no command for them.
printf '%s\n' "${files[@]}" | grep -E '\.(c|cpp)$' | grep -vE '^tests/(support/package|gpu)/' |
  xargs --max-procs="$(nproc)" --max-args=1 clang-tidy -p "$database" --quiet
