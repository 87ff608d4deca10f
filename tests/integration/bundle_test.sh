#!/usr/bin/env bash
# bundle_test.sh BUILD_DIR [ROOT]: packs what was built and runs it under a root directory that holds the C
# library and libgcc_s and nothing else, not even a shell; or under ROOT, the root of another distribution (see deploy/README.md).
# Exit status: 0 passed, 1 failed, 77 skipped because this machine allows no mounts.
set -euo pipefail

build=$1
root=${2:-}
if [[ -z ${EPD_BUNDLE_TEST_INSIDE:-} ]]; then
  # Mounts of our own, gone when we are; as root of a user namespace if we are not root.
  inside=(unshare --mount --propagation private)
  if (( EUID != 0 )); then inside+=(--user --map-root-user); fi
  if ! "${inside[@]}" true 2>/dev/null; then echo "skipped: this machine allows no mount namespace"; exit 77; fi
  if ! command -v patchelf >/dev/null; then echo "skipped: patchelf is not installed"; exit 77; fi
  EPD_BUNDLE_TEST_INSIDE=1 exec "${inside[@]}" "$BASH" "$0" "$@"
fi

fail() { echo "FAILED: $1" >&2; exit 1; }

work=$(mktemp -d "${TMPDIR:-/tmp}/epd-bundle-test-XXXXXX")
daemon=
proc=
sys=
cleanup() {
  if [[ -n $daemon ]]; then kill -KILL "$daemon" 2>/dev/null || true; wait "$daemon" || true; fi
  if [[ -n $proc ]]; then umount --lazy "$proc" || true; fi
  if [[ -n $sys ]]; then umount --lazy "$sys" || true; fi
  rm -rf "$work"
}
trap cleanup EXIT

bundle=$(cd "$(dirname "$0")/../.." && pwd)/deploy/bundle.sh
if "$bundle" --build-dir "$build" --output "$work/old.tar.gz" --oldest-glibc 2.17 >"$work/refused" 2>&1; then
  fail "a bundle was made for a C library that is too old"
fi
grep -q 'needs the C library .*; allowed: 2.17 or older' "$work/refused" || fail "$(cat "$work/refused")"
"$bundle" --build-dir "$build" --output "$work/epd.tar.gz" | tee "$work/made"
# It needed 2.36, which kept it from Ubuntu 22.04 (2.35) and RHEL 9 (2.34).
grep -q 'needs glibc 2\.34$' "$work/made" || fail "the bundle does not run on RHEL 9"

if [[ -z $root ]]; then
  root=$work/root
  program=$build/bin/epd
  loader=$(readelf --program-headers "$program" | sed -n 's/.*program interpreter: \(.*\)]/\1/p')
  install -D "$loader" "$root$loader"
  libraries=$(dirname "$(ldd "$program" | awk '/libc\.so\.6/ {print $3}')")
  for library in libc.so.6 libm.so.6 libpthread.so.0 libdl.so.2 librt.so.1 libresolv.so.2 libgcc_s.so.1; do
    install -D "$libraries/$library" "$root$libraries/$library"
  done
fi
mkdir -p "$root/opt" "$root/proc" "$root/sys" "$root/tmp"
mount --bind /proc "$root/proc" || { echo "skipped: /proc can't be mounted under $root"; exit 77; }
proc=$root/proc
# UCX looks for network interfaces there.
mount --rbind /sys "$root/sys" || { echo "skipped: /sys can't be mounted under $root"; exit 77; }
sys=$root/sys
tar --extract --file "$work/epd.tar.gz" --directory "$root/opt"
home=/opt/$(tar --list --file "$work/epd.tar.gz" | sed -n '1s|/.*||p')

# there PROGRAM ARGUMENT...: a program of the bundle, with nothing of this machine's environment.
become() {
  local program=$1
  shift
  exec env --ignore-environment "$(command -v chroot)" "$root" "$home/bin/$program" "$@"
}
there() { (become "$@"); }

there epd --version
there epctl --version
cat >"$root/tmp/epd.toml" <<'END'
[daemon]
socket = "/tmp/epd.sock"
control_socket = "/tmp/control.sock"
[devices]
host = 2
END
there epd check-config --config "$home/etc/epd/epd.toml" >/dev/null
# The terms of epd, of the libraries that are copied, and of those whose headers are compiled in.
for terms in epd/LICENSE epd/libraries/libcli11-dev epd/libraries/nlohmann-json3-dev epd/libraries/libprotobuf32; do
  [[ -s $root$home/share/doc/$terms ]] || { echo "FAILED: the bundle lacks share/doc/$terms" >&2; exit 1; }
done

become epd serve --config /tmp/epd.toml >"$work/log" 2>&1 &
daemon=$!
for (( i = 0; i < 300; i++ )); do
  there epctl --socket /tmp/control.sock status >"$work/status" 2>&1 || true
  if grep -q 'host:0 *ready' "$work/status" && grep -q 'host:1 *ready' "$work/status"; then break; fi
  kill -0 "$daemon" 2>/dev/null || break
  sleep 0.1
done
cat "$work/status"
if (( i == 300 )) || ! kill -0 "$daemon" 2>/dev/null; then cat "$work/log"; fail "the daemon did not come up"; fi
there epctl --socket /tmp/control.sock doctor || fail "epctl doctor: status $?"
# Both end with 0 only if every result is right to the bit.
there epbench --socket /tmp/epd.sock --ranks 2 --op both --tokens 33 --hidden 512 --iters 6 --warmup 2 --check all
there epd-moe-demo --socket /tmp/epd.sock --ranks 2 --layers 2 --steps 1 --tokens 16 --hidden 512 --expert-rank 4
# And with a daemon of its own, which it finds beside itself.
there epbench --ranks 1 --op noop --iters 3

# stop LOG: the daemon ends well.
stop() {
  local status=0
  kill -TERM "$daemon"
  wait "$daemon" || status=$?
  daemon=
  if (( status != 0 )); then cat "$1"; fail "the daemon ended with status $status after SIGTERM"; fi
  if [[ -e $root/tmp/epd.sock ]]; then fail "the daemon left its socket behind"; fi
}
stop "$work/log"

# In a cluster its engines open the UCX of the bundle, with its modules.
cat >>"$root/tmp/epd.toml" <<'END'
[cluster]
name = "bundle"
node = "node-a"
listen = "127.0.0.1:17410"
advertise = "127.0.0.1:17410"
coordinator = "127.0.0.1:17410"
insecure = true
END
become epd serve --config /tmp/epd.toml >"$work/cluster-log" 2>&1 &
daemon=$!
for (( i = 0; i < 300; i++ )); do
  there epctl --socket /tmp/control.sock --json network >"$work/network" 2>/dev/null || true
  if [[ $(grep -o '"carrier": *"UCX 1' "$work/network" | wc -l) == 2 ]]; then break; fi
  kill -0 "$daemon" 2>/dev/null || break
  sleep 0.1
done
cat "$work/network"
if (( i == 300 )) || ! kill -0 "$daemon" 2>/dev/null; then cat "$work/cluster-log"; fail "engines have no UCX"; fi
stop "$work/cluster-log"
