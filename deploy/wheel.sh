#!/usr/bin/env bash
# Packs the Python packages into wheels, epd with libepd. See --help.
set -euo pipefail

usage() {
  cat <<'END'
Usage: deploy/wheel.sh [--help] [--output DIR] [--build-dir DIR]

Builds libepd (preset release) and packs client/python with it into epd-<version>-py3-none-<platform>.whl, for
`pip install`. Nothing is downloaded. The wheel needs Python 3.9, the C library and libstdc++.

Also packs client/deep_ep into deep_ep-<version>-py3-none-any.whl: the interface of DeepEP over epd. It takes the
place of DeepEP's own package, so install it only where that is wanted. It needs the first wheel and torch.

  --output DIR      where to write them [.]
  --build-dir DIR   packs what was built there, and builds nothing

The platform says the oldest C library that the wheel runs with (manylinux_2_34_x86_64 when built on Debian 12:
Ubuntu 22.04, RHEL 9 and newer).
Refused is what would not run elsewhere: a library that is not on every such system, or a path of this machine.
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=deploy/dependencies.sh
source "$root/deploy/dependencies.sh"

output=.
build_dir=
read_options output build-dir -- "$@"
build_preset release epd_client
need_tools python3 readelf strip patchelf
mkdir -p "$output"
work=$(mktemp -d "${TMPDIR:-/tmp}/epd-wheel-XXXXXX")
trap 'rm -rf "$work"' EXIT

library=$work/libepd.so.1
cp --dereference "$build_dir/lib/libepd.so.1" "$library"
strip --strip-unneeded "$library"
patchelf --remove-rpath "$library"
for path in "$root" "$build_dir"; do
  if grep --quiet --fixed-strings --text -e "$path/" "$library"; then
    echo "error: libepd contains '$path/', a path of this machine" >&2
    exit 1
  fi
done
build_version
python3 "$root/client/python/build_wheel.py" --library "$library" --version "$version" --output "$output"
