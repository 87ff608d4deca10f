#!/usr/bin/env bash
# units_test.sh BUILD_DIR: installs into a directory and holds the units, sysusers.d and tmpfiles.d against systemd's own
# tools. Exit status: 0 passed, 1 failed, 77 skipped because systemd's tools are missing.
set -euo pipefail

build=$1
if [[ $(systemd-analyze --version 2>/dev/null | sed -n '1s/systemd \([0-9]*\).*/\1/p') -lt 252 ]]; then
  echo "skipped: systemd-analyze 252 or later is not installed"
  exit 77
fi

fail() { echo "FAILED: $1" >&2; exit 1; }

work=$(mktemp -d "${TMPDIR:-/tmp}/epd-units-test-XXXXXX")
trap 'rm -rf "$work"' EXIT
root=$work/root
units=$root/usr/lib/systemd/system
DESTDIR=$root cmake --install "$build" --prefix /usr --component daemon >/dev/null

# The tools look at what units name: systemd's own units, and the programs of others.
mkdir -p "$root/bin" "$root/lib" "$root/etc/systemd/system"
ln -s ../usr/lib/systemd "$root/lib/systemd"
cp --archive --no-clobber /lib/systemd/system/. "$units"
for program in bin/sh usr/bin/nvidia-cuda-mps-control; do install -D /bin/true "$root/$program"; done

for unit in epd.service nvidia-mps.service; do
  said=$(systemd-analyze verify --recursive-errors=no --root="$root" $unit 2>&1) || fail "$unit: $said"
  if [[ -n $said ]]; then fail "$unit: $said"; fi
  systemd-analyze security --root="$root" --offline=true --threshold=30 --no-pager $unit >"$work/score" ||
    fail "$(tail -n 1 "$work/score")"
  tail -n 1 "$work/score"
done

# The files that the units and the documents name are there.
documentation=$(sed -n 's|^Documentation=file://||p' "$units/epd.service")
[[ -f $root$documentation ]] || fail "epd.service names $documentation"
for file in prometheus/epd.rules.yml grafana/epd.json test-ca.sh; do
  [[ -f $root/usr/share/epd/$file ]] || fail "share/epd/$file is not installed"
done

# Without the drop-in for GPUs there are no devices, and less is open.
score() { systemd-analyze security --root="$root" --offline=true --no-pager epd.service | sed -n 's/.*service: \([0-9.]*\).*/\1/p'; }
with=$(score)
mkdir "$root/etc/systemd/system/epd.service.d"
ln -s /dev/null "$root/etc/systemd/system/epd.service.d/epd-gpu.conf"
without=$(score)
awk -v with="$with" -v without="$without" 'BEGIN {exit !(without < with)}' || fail "$without without epd-gpu.conf, $with with it"
echo "epd.service without epd-gpu.conf: $without"

# These checks do find what is wrong.
printf '[Service]\nNonsense=1\n' >"$root/etc/systemd/system/epd.service.d/wrong.conf"
[[ $(systemd-analyze verify --recursive-errors=no --root="$root" epd.service 2>&1) == *Nonsense* ]] || fail "an unknown key is not found"
printf '[Service]\nSystemCallFilter=\nRestrictNamespaces=no\nProtectSystem=no\nNoNewPrivileges=no\nCapabilityBoundingSet=~\n' \
  >"$root/etc/systemd/system/epd.service.d/wrong.conf"
if systemd-analyze security --root="$root" --offline=true --threshold=30 --no-pager epd.service >/dev/null 2>&1; then
  fail "an open service passes"
fi

# Another place: the unit names it. A configuration that somebody has edited stays.
cmake --install "$build" --prefix "$work/opt" --component daemon >/dev/null
grep -q "^ExecStart=$work/opt/bin/epd serve --config $work/opt/etc/epd/epd.toml\$" "$work/opt/lib/systemd/system/epd.service" ||
  fail "$(grep ExecStart "$work/opt/lib/systemd/system/epd.service")"
"$work/opt/bin/epd" check-config --quiet --config "$work/opt/etc/epd/epd.toml" || fail "the installed configuration has an error"
echo '# mine' >>"$work/opt/etc/epd/epd.toml"
cmake --install "$build" --prefix "$work/opt" --component daemon >/dev/null
grep -q '^# mine' "$work/opt/etc/epd/epd.toml" || fail "an edited configuration was overwritten"
cmp --silent "$work/opt/etc/epd/epd.toml.new" "$root/etc/epd/epd.toml" || fail "the new configuration is not beside the edited one"

# People run this before they reload.
echo 'nonsense = 1' >>"$work/opt/etc/epd/epd.toml"
if "$work/opt/bin/epd" check-config --quiet --config "$work/opt/etc/epd/epd.toml" >"$work/out" 2>"$work/err"; then
  fail "check-config passes an unknown option"
fi
[[ ! -s $work/out ]] || fail "check-config --quiet prints $(cat "$work/out")"
grep -q 'unknown option .*nonsense' "$work/err" || fail "check-config says: $(cat "$work/err")"

# User, groups and directories. Only root can give directories to other users.
systemd-sysusers --root="$root" epd.conf 2>"$work/sysusers" || fail "$(cat "$work/sysusers")"
grep -q '^epd:x:[0-9]*:[0-9]*:.*:/var/lib/epd:/usr/sbin/nologin$' "$root/etc/passwd" || fail "$(cat "$root/etc/passwd")"
for group in video render; do grep -q "^$group:.*:epd\$" "$root/etc/group" || fail "epd is not in $group"; done
if (( EUID == 0 )); then
  systemd-tmpfiles --root="$root" --create epd.conf 2>"$work/tmpfiles" || fail "$(cat "$work/tmpfiles")"
  owner=$(sed -n 's/^epd:x:\([0-9]*\):\([0-9]*\):.*/\1:\2/p' "$root/etc/passwd")
  for expected in "run/epd 755" "var/lib/epd 750" "run/nvidia-mps 750"; do
    read -r directory mode <<<"$expected"
    [[ $(stat --format '%u:%g %a' "$root/$directory") == "$owner $mode" ]] || fail "$(stat "$root/$directory")"
  done
fi
