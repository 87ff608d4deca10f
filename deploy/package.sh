#!/usr/bin/env bash
# Packs epd into Debian packages. See --help.
set -euo pipefail

usage() {
  cat <<'END'
Usage: deploy/package.sh [--help] [--output DIR] [--build-dir DIR]

Builds epd (preset package) and makes the Debian packages epd (daemon, service, tools), libepd1 (client
library), libepd-dev (headers) and python3-epd (module epd), for the Debian release that this machine runs.

  --output DIR      where to write them [.]
  --build-dir DIR   packs what was built there, and builds nothing

The maintainer is a placeholder. Whoever gives the packages to others configures the build with
-D EPD_MAINTAINER="NAME <ADDRESS>".
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=deploy/dependencies.sh
source "$root/deploy/dependencies.sh"

output=.
build_dir=
read_options output build-dir -- "$@"
build_preset package
need_tools cpack dpkg-shlibdeps dpkg-deb
mkdir -p "$output"
output=$(cd "$output" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/epd-package-XXXXXX")
trap 'rm -rf "$work"' EXIT
umask 022
build_version
quietly "Packing" cpack --config "$build_dir/CPackConfig.cmake" -D CPACK_PACKAGE_VERSION="$version" -B "$work"
for package in "$work"/*.deb; do
  if grep --quiet --fixed-strings "$build_dir" <(dpkg-deb --fsys-tarfile "$package"); then
    echo "error: $(basename "$package") contains '$build_dir', a path of this machine" >&2
    exit 1
  fi
  mv "$package" "$output"
  echo "$output/$(basename "$package"): $(du --human-readable "$output/$(basename "$package")" | cut -f1)"
done
