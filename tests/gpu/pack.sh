#!/usr/bin/env bash
# Packs what was built here for a machine with GPUs that has none of our libraries. See --help.
set -euo pipefail

if (( $# != 2 )) || [[ $1 == --help || $1 == -h ]]; then
  cat <<'END'
Usage: tests/gpu/pack.sh BUILD_DIR DIR

Copies the daemon, epctl, libepd, epbench and the tests that know CUDA devices from BUILD_DIR (build/dev) into DIR,
without debug information, and eu-stack (Debian's elfutils), with the libraries they need but for the C library: DIR/bin,
DIR/lib. DIR/bin/asserts and DIR/bin/sm80 have daemons with other images of the kernels (tests/README.md). There:
tests/gpu/run.sh --daemon DIR
END
  exit 2
fi
build=$1
out=$2
if ! eu_stack=$(command -v eu-stack); then echo "error: eu-stack is missing (apt-get install elfutils)" >&2; exit 1; fi
programs=("$build"/bin/{epd,epctl,epbench,operations_test,gpu_fault_test} "$eu_stack")

rm -rf "$out"
mkdir -p "$out/bin" "$out/lib"
for program in "${programs[@]}"; do
  if [[ ! -x $program ]]; then echo "error: $program is not built" >&2; exit 1; fi
  strip --strip-debug -o "$out/bin/$(basename "$program")" "$program"  # its own names stay, for eu-stack
done
for image in asserts sm80; do
  if [[ ! -x $build/bin/$image/epd ]]; then echo "error: $build/bin/$image/epd is not built (cmake --build $build --target nightly)" >&2; exit 1; fi
  mkdir "$out/bin/$image"
  strip --strip-debug -o "$out/bin/$image/epd" "$build/bin/$image/epd"
  ln -s ../epctl "$out/bin/$image/epctl"
  patchelf --set-rpath "\$ORIGIN/../../lib" "$out/bin/$image/epd"
done
while read -r soname path; do
  case $soname in
    libc.so.6 | libm.so.6 | libmvec.so.1 | libpthread.so.0 | libdl.so.2 | librt.so.1 | libresolv.so.2) continue ;;
  esac
  strip -o "$out/lib/$soname" "$path"
done < <(ldd "${programs[@]}" | awk '/=> \// {print $1, $3}' | sort --unique)
for program in "${programs[@]}"; do
  patchelf --set-rpath "\$ORIGIN/../lib" "$out/bin/$(basename "$program")"
done
for file in "$out"/lib/*; do patchelf --set-rpath "\$ORIGIN" "$file"; done
du --summarize --human-readable "$out"
