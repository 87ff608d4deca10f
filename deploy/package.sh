#!/usr/bin/env bash
# Packs epd into Debian packages. See --help.
set -euo pipefail

usage() {
  cat <<'END'
Usage: deploy/package.sh [--help] [--output DIR] [--build-dir DIR]

Builds epd (preset package) and makes the Debian packages epd (daemon, service, tools), libepd0 (client
library) and libepd-dev (headers), for the Debian release that this machine runs.

  --output DIR      where to write them [.]
  --build-dir DIR   packs what was built there, and builds nothing
END
}

output=.
build=
while (( $# > 0 )); do
  case $1 in
    --help | -h) usage; exit 0 ;;
    --output | --build-dir)
      if (( $# < 2 )); then echo "error: $1 needs a value" >&2; exit 2; fi
      case $1 in
        --output) output=$2 ;;
        --build-dir) build=$2 ;;
      esac
      shift 2 ;;
    *) echo "error: '$1'; allowed: --output, --build-dir" >&2; exit 2 ;;
  esac
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=deploy/dependencies.sh
source "$root/deploy/dependencies.sh"

if [[ -z $build ]]; then
  install_dependencies
  build=$root/build/package
  (cd "$root" && quietly "Configuring" cmake --preset package)
  quietly "Building" cmake --build "$build" --parallel "$(build_jobs)"
fi
for tool in cpack dpkg-shlibdeps dpkg-deb; do
  if ! command -v "$tool" >/dev/null; then echo "error: $tool is missing (packages cmake, dpkg-dev, dpkg)" >&2; exit 1; fi
done
build=$(cd "$build" && pwd)
mkdir -p "$output"
output=$(cd "$output" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/epd-package-XXXXXX")
trap 'rm -rf "$work"' EXIT
umask 022
quietly "Packing" cpack --config "$build/CPackConfig.cmake" -B "$work"
for package in "$work"/*.deb; do
  if grep --quiet --fixed-strings "$build" <(dpkg-deb --fsys-tarfile "$package"); then
    echo "error: $(basename "$package") contains '$build', a path of this machine" >&2
    exit 1
  fi
  mv "$package" "$output"
  echo "$output/$(basename "$package"): $(du --human-readable "$output/$(basename "$package")" | cut -f1)"
done
