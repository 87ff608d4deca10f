#!/usr/bin/env bash
# Packs epd into one archive that runs elsewhere. See --help.
set -euo pipefail

usage() {
  cat <<'END'
Usage: deploy/bundle.sh [--help] [--output FILE] [--build-dir DIR] [--oldest-glibc VERSION]

Builds epd (preset release) and packs it with every library that it needs, but for the C library and libgcc_s, into
epd-<version>-<arch>.tar.gz: unpack it anywhere and run bin/epd. The target needs these two only, and every
distribution has them.

  --output FILE           where to write it [./epd-<version>-<arch>.tar.gz]
  --build-dir DIR         packs what was built there, and builds nothing
  --oldest-glibc VERSION  refuse to need a newer C library than this [2.34, RHEL 9's]

Refused is what would not run elsewhere: a program or library that needs a newer C library, a libepd that needs a
newer C++ runtime than RHEL 9's, a library or a symbol that is not in the bundle, or a path of this machine.
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=deploy/dependencies.sh
source "$root/deploy/dependencies.sh"

output=
build_dir=
oldest_glibc=2.34
oldest_glibcxx=3.4.29  # GCC 11's, of RHEL 9: libepd takes the runtime of the process that links it
read_options output build-dir oldest-glibc -- "$@"
build_preset release
need_tools patchelf readelf ldd gcc
work=$(mktemp -d "${TMPDIR:-/tmp}/epd-bundle-XXXXXX")
trap 'rm -rf "$work"' EXIT
build_version
name=epd-$version-$(uname -m)
output=${output:-$PWD/$name.tar.gz}
stage=$work/$name

# The C library and the loader are the target's own: they fit its kernel, its users and its drivers. libgcc_s comes
# with them everywhere; Debian 12's needs glibc 2.35.
is_from_target() {
  case $1 in
    ld-linux*.so.* | libc.so.6 | libm.so.6 | libmvec.so.1 | libpthread.so.0 | libdl.so.2 | librt.so.1 | \
      libresolv.so.2 | libutil.so.1 | libanl.so.1 | libgcc_s.so.1 | linux-vdso.so.1) return 0 ;;
  esac
  return 1
}

# Programs and libraries in the bundle, links left out.
binaries() { find "$stage/bin" "$stage/lib" -type f \( -perm -u+x -o -name '*.so*' \); }

needed() { readelf --dynamic --wide "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'; }

newer() { printf '%s\n' "$1" "$2" | sort --version-sort | tail -n 1; }

fail() { echo "error: $1" >&2; exit 1; }

# Copies each library that a program needs, under the name by which it is looked for. Not beside libepd: who
# links libepd from lib/ has a C++ runtime of his own.
add_libraries() {
  local soname path
  mkdir -p "$stage/lib/epd"
  while read -r soname path; do
    if is_from_target "$soname" || [[ -e $stage/lib/$soname ]]; then continue; fi
    if [[ ! -f $path ]]; then fail "$soname, which a program needs, is not on this machine"; fi
    install --mode 644 "$path" "$stage/lib/epd/$soname"
    realpath "$path" >>"$work/copied"
  done < <(for program in "$stage"/bin/*; do ldd "$program"; done | awk '/=>/ {print $1, $3}' | sort --unique)
}

# Debian 12's C++ runtime takes arc4random from glibc 2.36, for std::random_device. The runtime is linked again from the
# same objects, with an arc4random of its own.
relink_runtime() {
  local objects
  objects=$(dirname "$(gcc -print-libgcc-file-name)")
  if [[ ! -f $objects/libstdc++_pic.a ]]; then
    fail "libstdc++_pic.a is missing (package libstdc++-$(gcc -dumpversion)-pic)"
  fi
  gcc -O2 -fPIC -fvisibility=hidden -c -x c -o "$work/arc4random.o" - <<'END'
#include <sys/random.h>
unsigned arc4random(void) {
  unsigned value;
  while (getrandom(&value, sizeof(value), 0) != sizeof(value)) {}
  return value;
}
END
  gcc -shared -nodefaultlibs -s -o "$stage/lib/epd/libstdc++.so.6" -Wl,-soname,libstdc++.so.6 -Wl,-z,relro,-z,defs \
    -Wl,--version-script="$objects/libstdc++_pic.map" -Wl,--whole-archive "$objects/libstdc++_pic.a" \
    -Wl,--no-whole-archive "$work/arc4random.o" "$objects/libstdc++.a" -lm -lgcc_s -lc -lgcc
}

# UCX, which engines open at run time to reach other nodes, and its modules for RDMA. UCX looks for these in ucx/
# beside its own libraries, and leaves them out where the target has no RDMA libraries.
add_ucx() {
  local ucp soname path module
  ucp=$(ldconfig -p | sed -n 's|.*libucp\.so\.0 (.*x86-64.*) => ||p;s|.*libucp\.so\.0 (.*AArch64.*) => ||p' | head -n 1)
  if [[ ! -f $ucp ]]; then fail "libucp.so.0, which engines open to reach other nodes, is not on this machine"; fi
  while read -r soname path; do
    if is_from_target "$soname" || [[ -e $stage/lib/epd/$soname ]]; then continue; fi
    install --mode 644 "$path" "$stage/lib/epd/$soname"
    realpath "$path" >>"$work/copied"
  done < <(echo "libucp.so.0 $ucp"; ldd "$ucp" | awk '/=>/ {print $1, $3}')
  for module in libuct_ib.so.0 libuct_rdmacm.so.0; do
    path=$(dirname "$(realpath "$ucp")")/ucx/$module
    if [[ -f $path ]]; then install -D --mode 644 "$path" "$stage/lib/epd/ucx/$module"; fi
  done
}

# The target's own, if it has RDMA.
is_from_rdma() { [[ $1 == libibverbs.so.1 || $1 == libmlx5.so.1 || $1 == librdmacm.so.1 ]]; }

# The terms under which the libraries may be passed on. Without dpkg there is nobody to ask.
add_licences() {
  local package
  if ! command -v dpkg-query >/dev/null; then return 0; fi
  # Files are registered under / or under /usr; the other is not found.
  while read -r package; do
    if [[ -f /usr/share/doc/$package/copyright ]]; then
      install -D --mode 644 "/usr/share/doc/$package/copyright" "$stage/share/doc/epd/libraries/$package"
    fi
  done < <(
    { sed 'p; s|^/usr||' "$work/copied" | xargs dpkg-query --search 2>/dev/null || true; } | cut -d: -f1 | sort --unique
    # The headers of these packages are compiled in.
    printf '%s\n' libcli11-dev libtomlplusplus-dev nlohmann-json3-dev libspdlog-dev libfmt-dev libboost-dev
  )
}

# Where each looks for its libraries, from where it is itself.
set_search_paths() {
  local file
  while read -r file; do
    case $file in
      "$stage"/bin/*) patchelf --set-rpath "\$ORIGIN/../lib:\$ORIGIN/../lib/epd" "$file" ;;
      "$stage"/lib/epd/ucx/*) patchelf --set-rpath "\$ORIGIN:\$ORIGIN/.." "$file" ;;
      "$stage"/lib/epd/*) patchelf --set-rpath "\$ORIGIN" "$file" ;;
      *) patchelf --remove-rpath "$file" ;;  # libepd: found by who links it, takes the process's C++ runtime
    esac
  done < <(binaries)
}

# newest_version FILE LIBRARY: the newest of a library's symbol versions that a file needs, if any.
newest_version() {
  readelf --version-info --wide "$1" | sed -n "s/.*Name: $2_\([0-9.]*\).*/\1/p" | sort --version-sort | tail -n 1
}

# Holds the bundle against what the target will have. Sets newest_of_all, the C library that it needs.
check() {
  local file soname newest paths path
  newest_of_all=
  while read -r file; do
    newest=$(newest_version "$file" GLIBC)
    if [[ $(newer "$newest" "$oldest_glibc") != "$oldest_glibc" ]]; then
      fail "${file#"$stage"/} needs the C library $newest; allowed: $oldest_glibc or older"
    fi
    newest_of_all=$(newer "$newest" "$newest_of_all")
    while read -r soname; do
      if [[ $file == "$stage"/lib/epd/ucx/* ]] && is_from_rdma "$soname"; then continue; fi
      if [[ $file == "$stage"/lib/epd/ucx/* && -e $stage/lib/epd/ucx/$soname ]]; then continue; fi
      if ! is_from_target "$soname" && [[ ! -e $stage/lib/$soname && ! -e $stage/lib/epd/$soname ]]; then
        fail "${file#"$stage"/} needs $soname, which is not in the bundle"
      fi
    done < <(needed "$file")
    paths=$(readelf --dynamic --wide "$file" | sed -n 's/.*(R[A-Z]*PATH).*\[\(.*\)\]/\1/p' | tr ':' '\n' |
              grep --invert-match '^\$ORIGIN' || true)
    if [[ -n $paths ]]; then fail "${file#"$stage"/} looks for libraries in '$paths'; allowed: \$ORIGIN/..."; fi
    if [[ $file == "$stage"/bin/* ]] && ldd -r "$file" 2>&1 | grep 'undefined symbol' >"$work/undefined"; then
      fail "${file#"$stage"/} lacks symbols: $(head -n 1 "$work/undefined")"
    fi
  done < <(binaries)
  newest=$(newest_version "$(realpath "$stage/lib/libepd.so")" GLIBCXX)
  if [[ $(newer "$newest" "$oldest_glibcxx") != "$oldest_glibcxx" ]]; then
    fail "libepd needs the C++ runtime $newest; allowed: $oldest_glibcxx or older"
  fi
  for path in "$root" "$build_dir" "$work"; do
    file=$(grep --recursive --files-with-matches --fixed-strings --text -e "$path/" "$stage" | head -n 1 || true)
    if [[ -n $file ]]; then fail "${file#"$stage"/} contains '$path/', a path of this machine"; fi
  done
}

quietly "Installing" cmake --install "$build_dir" --prefix "$stage" --strip
rm -rf "$stage"/lib/{systemd,sysusers.d,tmpfiles.d}  # names the place of an installation; see README.md
add_libraries
relink_runtime
add_ucx
add_licences
set_search_paths
check
tar --create --gzip --file "$output" --directory "$work" --sort=name --owner=0 --group=0 --numeric-owner "$name"
echo "$output: $(du --human-readable "$output" | cut -f1), needs glibc $newest_of_all"
