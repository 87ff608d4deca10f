#!/usr/bin/env bash
# versions_test.sh: all builds between two releases called themselves 0.1.0. Now only a release does.
# Exit status: 0 passed, 1 failed, 77 skipped because git is not installed.
set -euo pipefail

if ! command -v git >/dev/null; then echo "skipped: git is not installed"; exit 77; fi
script=$(cd "$(dirname "$0")/../.." && pwd)/deploy/cmake/commit.cmake
work=$(mktemp -d "${TMPDIR:-/tmp}/epd-versions-test-XXXXXX")
trap 'rm -rf "$work"' EXIT
export GIT_CEILING_DIRECTORIES=$work GIT_CONFIG_GLOBAL=/dev/null

# expect VERSION COMMIT [GIVEN]: what a build of $work/source tells.
expect() {
  cmake -D OUTPUT="$work/commit.h" -D SOURCE="$work/source" -D VERSION=0.1.0 -D COMMIT="${3:-}" -P "$script"
  printf '#define EPD_COMMIT "%s"\n#define EPD_BUILD_VERSION "%s"\n' "$2" "$1" >"$work/expected"
  diff "$work/expected" "$work/commit.h" || { echo "FAILED: version $1, commit $2" >&2; exit 1; }
}
in_git() { git -C "$work/source" -c user.name=test -c user.email=test@localhost "$@"; }

mkdir "$work/source"
expect 0.1.0 unknown
expect 0.1.0+g229aa93f1c2d 229aa93f1c2d 229aa93f1c2d
in_git init --quiet
echo 1 >"$work/source/file"
in_git add file
in_git commit --quiet --message=one
commit=$(in_git rev-parse --short=12 HEAD)
expect "0.1.0+g$commit" "$commit"
echo 2 >"$work/source/file"
expect "0.1.0+g$commit.dirty" "$commit-dirty"
in_git tag v0.1.0
expect "0.1.0+g$commit.dirty" "$commit-dirty"
in_git checkout --quiet file
expect 0.1.0 "$commit"
echo "versions of releases and of builds between them"
