#!/usr/bin/env bash
# package_test.sh BUILD_DIR: packs what was built into Debian packages, and installs, starts, uses, updates and removes them
# in a Debian root of its own, under a systemd that is PID 1 of namespaces of its own. The root is made by mmdebstrap from a
# Debian mirror once, and kept in BUILD_DIR.
# Exit status: 0 passed, 1 failed, 77 skipped because this machine can't do that.
set -euo pipefail

build=$(cd "$1" && pwd)
tests=$(cd "$(dirname "$0")/.." && pwd)
skip() { echo "skipped: $1"; exit 77; }
fail() { echo "FAILED: $1" >&2; exit 1; }

# The rest of this script runs once in the namespaces, and then under systemd. $root is a directory of the outside.
if [[ -n ${EPD_PACKAGE_TEST_ROOT:-} ]]; then
  root=$EPD_PACKAGE_TEST_ROOT
  mount --bind "$root" "$root"
  for directory in run tmp dev; do mount -t tmpfs -o mode=755 tmpfs "$root/$directory"; done
  chmod 1777 "$root/tmp"
  mount -t proc proc "$root/proc"
  mount --bind "$root/proc/sys" "$root/proc/sys"  # the machine's own settings
  mount -o remount,bind,ro "$root/proc/sys"
  mount -t sysfs -o ro sysfs "$root/sys"
  mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
  mkdir "$root/dev/shm" "$root/dev/pts"
  mount -t tmpfs tmpfs "$root/dev/shm"
  mount -t devpts -o newinstance,ptmxmode=666 devpts "$root/dev/pts"
  ln -s pts/ptmx "$root/dev/ptmx"
  for node in null zero full random urandom tty; do
    touch "$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
  done
  # Stands for a GPU: a device that is not among those that every service has.
  if [[ -c /dev/fuse ]]; then
    touch "$root/dev/nvidia0"
    mount --bind /dev/fuse "$root/dev/nvidia0"
  fi
  cd "$root"
  pivot_root . mnt
  umount --lazy /mnt
  exec setpriv --bounding-set -sys_time,-sys_module,-sys_rawio \
    env --ignore-environment container=epd-package-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --log-target=journal --show-status=no </dev/null >/dev/null 2>&1
fi

if (( EUID != 0 )); then skip "only root may boot a systemd"; fi
for tool in mmdebstrap cpack dpkg-shlibdeps unshare nsenter setpriv pgrep pkg-config; do
  command -v "$tool" >/dev/null || skip "$tool is not installed"
done
namespaces=(unshare --mount --pid --uts --ipc --cgroup --net --fork --kill-child --propagation private)
"${namespaces[@]}" true 2>/dev/null || skip "this machine allows no namespaces"
cgroups=$(awk '$3 == "cgroup2" {print $2; exit}' /proc/mounts)$(sed -n 's/^0:://p' /proc/self/cgroup)
cgroup=${cgroups%/}/epd-package-test-$$
mkdir "$cgroup" 2>/dev/null || skip "this machine allows no control group ($cgroup)"

work=$(mktemp -d "${TMPDIR:-/tmp}/epd-package-test-XXXXXX")
unshared=
cleanup() {
  if [[ -n $unshared ]]; then
    kill -KILL "$unshared" 2>/dev/null || true
    wait "$unshared" 2>/dev/null || true
  fi
  # Processes of the namespaces take a moment to end.
  for (( i = 0; i < 100; i++ )); do
    find "$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null && break
    sleep 0.1
  done
  rm -rf --one-file-system "$work"
}
trap cleanup EXIT

"$tests/../deploy/package.sh" --build-dir "$build" --output "$work/packages"
package() { echo "$work/packages/$1"_*.deb; }
field() { dpkg-deb --field "$(package "$1")" "$2"; }

# Dependencies are Debian's own and those of ours, and enough: the root has nothing else.
depends=$(field epd Depends)
for expected in 'libepd1 (= ' 'libgrpc++' 'libc6 (>= ' 'init-system-helpers'; do
  [[ $depends == *"$expected"* ]] || fail "epd depends on $depends"
done
[[ $(field libepd-dev Depends) == "libepd1 (= $(field libepd1 Version))" ]] || fail "libepd-dev depends on $(field libepd-dev Depends)"
[[ $(field python3-epd Depends) == *"libepd1 (= $(field libepd1 Version))"* ]] || fail "python3-epd depends on $(field python3-epd Depends)"
for part in epd libepd1 libepd-dev python3-epd; do
  [[ $(field $part Maintainer) == *'<'*'@'*'>' ]] || fail "the maintainer of $part is $(field $part Maintainer)"
  dpkg-deb --fsys-tarfile "$(package $part)" | tar --extract --to-stdout "./usr/share/doc/$part/copyright" |
    grep --quiet '^License: Apache-2.0' || fail "$part has no copyright file"
done
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
wanted=$(printf '%s, %s, %s' "$depends" "$(field libepd1 Depends)" "$(field python3-epd Depends)" | tr ',' '\n' |
           sed 's/|.*//; s/(.*//; s/ //g; /^libepd/d' | sort --unique | paste --serial --delimiters=,)
key=$(printf '%s' "$suite $wanted" | sha256sum | cut -c 1-16)
kept=$build/deploy/package-test-root-$key.tar
if [[ ! -f $kept ]]; then
  begin=$SECONDS
  mkdir -p "$build/deploy"
  rm -f "$build"/deploy/package-test-root-*
  if ! timeout 240 mmdebstrap --quiet --variant=minbase --include="$wanted" --dpkgopt=force-unsafe-io \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --aptopt='Acquire::Languages "none"' "$suite" "$build/deploy/unfinished.tar" http://deb.debian.org/debian >"$work/mmdebstrap" 2>&1; then
    cat "$work/mmdebstrap"
    rm -f "$build/deploy/unfinished.tar"
    skip "mmdebstrap could make no root: no mirror? (its output is above)"
  fi
  mv "$build/deploy/unfinished.tar" "$kept"
  echo "Root made in $((SECONDS - begin)) s"
fi
root=$work/root
mkdir "$root"
tar --extract --file "$kept" --directory "$root"
cp "$work"/packages/*.deb "$root/opt"
# No business of a test: the machine's settings, consoles and mounts.
for unit in systemd-sysctl.service systemd-modules-load.service getty.target dev-hugepages.mount dev-mqueue.mount \
  sys-kernel-debug.mount sys-kernel-tracing.mount sys-fs-fuse-connections.mount apt-daily.timer apt-daily-upgrade.timer; do
  ln -sf /dev/null "$root/etc/systemd/system/$unit"
done

# Into a root that no systemd runs, and that has no /proc: how images are built.
for action in "--install /opt/*.deb" "--remove epd libepd-dev python3-epd" "--purge epd libepd1 libepd-dev python3-epd"; do
  chroot "$root" sh -c "dpkg $action" >"$work/dpkg" 2>&1 || { cat "$work/dpkg" >&2; fail "without systemd: dpkg $action"; }
done
(echo "$BASHPID" >"$cgroup/cgroup.procs"
 EPD_PACKAGE_TEST_ROOT=$root exec setpriv --pdeathsig KILL "${namespaces[@]}" "$BASH" "$0" "$build") &
unshared=$!
init=
# there COMMAND...: in the root, beside its systemd.
there() { nsenter --target "$init" --all -- env --ignore-environment PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"; }
eventually() {  # eventually SECONDS COMMAND...
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    if (( SECONDS >= end )); then return 1; fi
    sleep 0.1
  done
}
explain() { there journalctl --no-pager --lines=60 >&2 || true; fail "$1"; }
booted() { init=$(pgrep --parent "$unshared") && there systemctl --quiet is-active multi-user.target; }
eventually 30 booted || skip "systemd does not come up in namespaces here"

files() { there find / -xdev -not -path '/proc/*' -not -path '/var/log/*' -not -path '/tmp/*' -not -path '/opt/*' -not -path '/var/cache/*' | sort; }
property() { there systemctl show --value --property="$1" "${2:-epd.service}"; }
# shellcheck disable=SC2053  # a pattern
says() { [[ $(property StatusText) == $1 ]]; }

files >"$work/before"
# Installed, and it runs.
there sh -c 'dpkg --install /opt/*.deb' >"$work/dpkg" 2>&1 || { cat "$work/dpkg" >&2; explain "dpkg --install"; }
eventually 20 says 'serving: 1 device, 0 sessions, 0 groups' || explain "epd says: $(property StatusText)"
there systemctl --quiet is-enabled epd.service || explain "epd.service is not enabled"
echo "Installed; $(property StatusText)"
there sed -i 's/^host = "auto"/host = 2/' /etc/epd/epd.toml
there systemctl restart epd.service || explain "restart"
eventually 20 says 'serving: 2 devices, 0 sessions, 0 groups' || explain "epd says: $(property StatusText)"
pid=$(property MainPID)
[[ $(there stat --format %U "/proc/$pid") == epd ]] || explain "epd runs as another user"

# Its view of the machine: it writes where it should, and the drop-in for GPUs closes no device.
view() { there nsenter --target "$pid" --mount -- "$@"; }
for directory in /run/epd /run/nvidia-mps /var/lib/epd; do view test -w "$directory" || explain "$directory is read-only to epd"; done
[[ $(property ReadWritePaths) == *"/run/nvidia-mps"* ]] || explain "it may write to: $(property ReadWritePaths)"
for directory in /etc /usr /var; do if view test -w "$directory"; then explain "epd may write to $directory"; fi; done
if there test -c /dev/nvidia0; then
  # In its control group, which has the list of devices, and its mounts.
  there sh -c "echo \$\$ >/sys/fs/cgroup/system.slice/epd.service/cgroup.procs
    exec nsenter --target $pid --mount -- sh -c ': </dev/nvidia0'" || explain "epd can't open a device"
else
  echo "not tested: whether devices are open; /dev/fuse, which stands for a GPU, is not here"
fi
[[ $(property LimitMEMLOCK) == infinity ]] || explain "LimitMEMLOCK is $(property LimitMEMLOCK)"
[[ $(property After) == *nvidia-fabricmanager.service* ]] || explain "it does not wait for the fabric manager: $(property After)"

# Used: members of the group may, others not.
there useradd --groups epd member
there useradd other
bench=(epbench --socket /run/epd/epd.sock --ranks 2 --op both --tokens 33 --hidden 512 --iters 6 --warmup 2 --check all)
as() { there setpriv --reuid "$1" --regid "$1" --init-groups "${@:2}"; }
as member "${bench[@]}" || explain "epbench of a member of the group: status $?"
if as other timeout 60 "${bench[@]}" >"$work/other" 2>&1; then explain "epbench of another user is let in"; fi
grep -qi 'permission denied' "$work/other" || explain "another user hears: $(cat "$work/other")"
there epctl status
there epctl doctor >"$work/doctor" || { cat "$work/doctor"; explain "epctl doctor"; }
# Python, as packaged: the module, its example, and bytecode that goes with it.
there sh -c 'ls /usr/lib/python3/dist-packages/epd/__pycache__/group.*.pyc' >/dev/null || explain "python3-epd has not been compiled"
example=$(as member env EPD_SOCKET=/run/epd/epd.sock python3 /usr/share/doc/python3-epd/examples/minimal.py 2>&1) || explain "minimal.py: $example"
[[ $example == 'received 8 rows, out begins with 0x3f80' ]] || explain "minimal.py says: $example"
there python3 -c 'import epd, sys; sys.exit(epd._library.path != "libepd.so.1")' ||
  explain "the module has loaded another library: $(there python3 -c 'import epd; print(epd._library.path)')"
# A program that is built against libepd-dev runs with libepd1.
for part in libepd1 libepd-dev; do dpkg-deb --extract "$(package $part)" "$work/sdk"; done
pkgconfig=$(find "$work/sdk" -name epd.pc -printf '%h')
read -r -a flags <<<"$(PKG_CONFIG_PATH=$pkgconfig pkg-config --cflags --libs epd)"
cc -std=c11 "$tests/support/package/consumer.c" "${flags[@]}" -o "$root/opt/consumer"
[[ $(there /opt/consumer) == $(there epd --version | sed -n '1s/epd \([0-9.]*\).*/\1/p') ]] || explain "the consumer says $(there /opt/consumer)"

# Reload: an error or a change that needs a restart fails it, with the reason, and the daemon continues.
there sed -i 's/^max_sessions = 256/max_sessions = -1/' /etc/epd/epd.toml
if there systemctl reload epd.service 2>/dev/null; then explain "a reload of a wrong file succeeds"; fi
if there epctl reload >"$work/reload" 2>&1; then explain "epctl reload of a wrong file succeeds"; fi
grep -q 'limits.max_sessions in .* is "-1"; allowed: 1..65536' "$work/reload" || explain "epctl reload says: $(cat "$work/reload")"
there sed -i 's/^max_sessions = -1/max_sessions = 5/; s/^host = 2/host = 3/' /etc/epd/epd.toml
if there systemctl reload epd.service 2>/dev/null; then explain "a reload that needs a restart succeeds"; fi
eventually 10 says '*the last reload was refused*' || explain "epd says: $(property StatusText)"
there sed -i 's/^host = 3/host = 2/' /etc/epd/epd.toml
there systemctl reload epd.service || explain "reload"
eventually 10 says 'serving: 2 devices, 0 sessions, 0 groups' || explain "epd says: $(property StatusText)"
there epctl health >"$work/health" || explain "epctl health says: $(cat "$work/health")"
there epctl config >"$work/config"
grep -q 'limits.max_sessions .*5' "$work/config" || explain "the new limit is not there: $(cat "$work/config")"
[[ $(property MainPID) == "$pid" ]] || explain "a reload took another process"

# In the journal lines have their importance, and not twice.
there journalctl --sync
errors=$(there journalctl --no-pager --unit=epd.service --priority=err --output=cat)
[[ $errors == *'level=error '*'configuration not reloaded'* ]] || explain "errors in the journal: $errors"
[[ $errors != *level=info* && $errors != *level=warning* && $errors != *'<3>'* ]] || explain "not only errors: $errors"

# An update leaves the running daemon, its clients and the edited configuration alone.
member='
import epd, sys
group = epd.attach(device="host:0").join(epd.GroupConfig(name="kept", num_ranks=1, num_experts=4, max_tokens=8, hidden=128, topk=1))
for line in sys.stdin:
    try:
        dispatch = group.dispatch(0, num_tokens=8)
        dispatch.wait(10000)
        group.combine(0, dispatch.handle).wait(10000)
        print("well", flush=True)
    except epd.Error as error:
        print(error, flush=True)
        group.resume()
'
mkfifo "$work/to" "$work/from"
as member python3 -c "$member" <"$work/to" >"$work/from" 2>"$work/member" &
exec 3>"$work/to" 4<"$work/from"
says_member() {  # says_member PATTERN: of its next operation
  local word=
  echo >&3
  read -r -t 30 word <&4 || true
  # shellcheck disable=SC2053  # a pattern
  [[ $word == $1 ]] || explain "a client says '$word' $(cat "$work/member")"
}
says_member well
there sh -c 'dpkg --install /opt/*.deb' >"$work/dpkg" 2>&1 </dev/null || { cat "$work/dpkg" >&2; explain "dpkg --install again"; }
grep -q 'restart it when its jobs allow' "$work/dpkg" || explain "the update says: $(cat "$work/dpkg")"
[[ $(property MainPID) == "$pid" ]] || explain "an update ended the running daemon"
there grep -q '^max_sessions = 5' /etc/epd/epd.toml || explain "an update overwrote the configuration"
says_member well
# An engine that dies is started again, from the program that the daemon was started from.
engine=$(there epctl --json devices | python3 -c 'import json, sys; print(json.load(sys.stdin)["devices"][0]["engine_pid"])')
there sh -c "kill -KILL $engine"
says_member '*ENGINE_RESTARTED*'
says_member well
there epctl health >"$work/health" || explain "epctl health says: $(cat "$work/health")"
exec 3>&- 4<&-
wait $!

# Metrics and health over TCP: without a network the daemon says what is missing; the drop-in of OPERATING.md gives it one.
there sed -i '/^\[metrics\]/,/^\[/ s/^listen = ""/listen = "127.0.0.1:0"/' /etc/epd/epd.toml
if there systemctl restart epd.service 2>/dev/null; then explain "metrics over TCP without a network"; fi
there journalctl --sync
[[ $(there journalctl --no-pager --unit=epd.service --priority=err --output=cat) == *"metrics.listen is "*'OPERATING.md, '* ]] ||
  explain "metrics without a network"
there sed -i 's/^listen = "127.0.0.1:0"/listen = "9455"/' /etc/epd/epd.toml
there mkdir -p /etc/systemd/system/epd.service.d
sed -n '/epd.service.d\/metrics.conf$/,/^```$/ {/^```$/d; p}' "$tests/../deploy/OPERATING.md" |
  there tee /etc/systemd/system/epd.service.d/metrics.conf >/dev/null
there systemctl daemon-reload
there systemctl reset-failed epd.service
there systemctl restart epd.service || explain "with metrics.conf"
scraped=$(there python3 -c 'import urllib.request; print(urllib.request.urlopen("http://127.0.0.1:9455/metrics").read().decode())') ||
  explain "no metrics"
[[ $scraped == *'epd_supervisor_up 1'* ]] || explain "metrics: $scraped"
there python3 -c 'import urllib.request; urllib.request.urlopen("http://127.0.0.1:9455/readyz")' || explain "not ready"
there rm -r /etc/systemd/system/epd.service.d
there sed -i 's/^listen = "9455"/listen = ""/' /etc/epd/epd.toml
there systemctl daemon-reload

# The watchdog: a daemon that is stopped is replaced.
there mkdir -p /run/systemd/system/epd.service.d
printf '[Service]\nWatchdogSec=6s\n' | there tee /run/systemd/system/epd.service.d/watchdog.conf >/dev/null
there systemctl daemon-reload
there systemctl restart epd.service
pid=$(property MainPID)
sleep 8
[[ $(property MainPID) == "$pid" ]] || explain "the watchdog ended a daemon that is well"
there sh -c "kill -STOP $pid"
replaced() { [[ $(property MainPID) != "$pid" && $(property MainPID) != 0 ]] && says 'serving: 2 devices*'; }
eventually 30 replaced || explain "a stopped daemon was not replaced: $(property Result)"
[[ $(property NRestarts) == 1 ]] || explain "restarts: $(property NRestarts)"
[[ $(there journalctl --no-pager --unit=epd.service) == *'Watchdog timeout'* ]] || explain "that was not the watchdog"

# A configuration with an error is not tried again and again.
there sed -i 's/^max_sessions = 5/max_sessions = -1/' /etc/epd/epd.toml
if there systemctl restart epd.service 2>/dev/null; then explain "epd starts with a wrong configuration"; fi
[[ $(property ActiveState) == failed && $(property NRestarts) == 0 && $(property ExecMainStatus) == 2 ]] ||
  explain "$(property ActiveState), $(property NRestarts) restarts, status $(property ExecMainStatus)"
there sed -i 's/^max_sessions = -1/max_sessions = 5/' /etc/epd/epd.toml

# MPS (a stand-in): the user, the folder, before epd; epd finds the same folder after a restart of MPS.
cat >"$root/usr/bin/nvidia-cuda-mps-control" <<'END'
#!/bin/sh
if [ "$1" != -d ]; then read -r command; [ "$command" = quit ] && kill "$(cat "$CUDA_MPS_PIPE_DIRECTORY/pid")"; exit; fi
touch "$CUDA_MPS_LOG_DIRECTORY/control.log"
sleep 1000 &
echo $! >"$CUDA_MPS_PIPE_DIRECTORY/pid"
END
chmod 755 "$root/usr/bin/nvidia-cuda-mps-control"
there systemctl --quiet enable nvidia-mps.service || explain "nvidia-mps.service can't be enabled"
there systemctl start nvidia-mps.service || explain "nvidia-mps.service"
there systemctl start epd.service || explain "epd.service beside nvidia-mps.service"
pid=$(property MainPID)
there systemctl restart nvidia-mps.service
there systemctl --quiet is-active nvidia-mps.service || explain "nvidia-mps.service is not active"
[[ $(there sh -c "tr '\0' ' ' </proc/$pid/environ") == *CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps* ]] || explain "epd does not know of MPS"
[[ $(view cat /run/nvidia-mps/pid) == $(property MainPID nvidia-mps.service) ]] || explain "epd sees another folder than MPS"
[[ $(there stat --format %U "/proc/$(property MainPID nvidia-mps.service)") == epd ]] || explain "MPS runs as another user"
# All of it as another user, as deploy/OPERATING.md says.
there sh -c 'for unit in nvidia-mps epd; do
    install -d /etc/systemd/system/$unit.service.d
    printf "[Service]\nUser=member\nGroup=member\n" > /etc/systemd/system/$unit.service.d/user.conf
  done
  sed "s/epd epd -/member member -/" /usr/lib/tmpfiles.d/epd.conf > /etc/tmpfiles.d/epd.conf
  systemctl stop epd nvidia-mps && rm -rf /run/epd /run/nvidia-mps /var/lib/epd
  systemd-tmpfiles --create && systemctl daemon-reload && systemctl start nvidia-mps epd' >"$work/user" 2>&1 ||
  explain "as another user: $(cat "$work/user")"
pid=$(property MainPID)
[[ $(view cat /run/nvidia-mps/pid) == $(property MainPID nvidia-mps.service) ]] || explain "epd sees another folder than MPS"
for unit in epd nvidia-mps; do
  [[ $(there stat --format %U "/proc/$(property MainPID $unit.service)") == member ]] || explain "$unit runs as another user"
done
as member "${bench[@]}" >"$work/bench" || explain "epbench beside a daemon of the same user: $(cat "$work/bench")"
there systemctl stop nvidia-mps.service epd.service
there rm -r /etc/systemd/system/nvidia-mps.service.d /etc/systemd/system/epd.service.d /etc/tmpfiles.d/epd.conf
there rm -r /run/epd /run/nvidia-mps /var/lib/epd
there systemd-tmpfiles --create epd.conf
there systemctl daemon-reload
[[ $(property Result nvidia-mps.service) == success ]] || explain "the end of MPS: $(property Result nvidia-mps.service)"
rm "$root/usr/bin/nvidia-cuda-mps-control"

# Without the drop-in for GPUs, epd sees no devices.
there mkdir -p /etc/systemd/system/epd.service.d
there ln -s /dev/null /etc/systemd/system/epd.service.d/epd-gpu.conf
there systemctl daemon-reload
there systemctl restart epd.service || explain "epd.service without epd-gpu.conf"
pid=$(property MainPID)
if view test -e /dev/nvidia0; then explain "a device is there without epd-gpu.conf"; fi
as member "${bench[@]}" >"$work/bench" || explain "epbench without epd-gpu.conf: $(cat "$work/bench")"
there rm -r /etc/systemd/system/epd.service.d
there systemctl daemon-reload

# Stopped: drained, with nothing left but its directory.
there systemctl stop epd.service
[[ $(property Result) == success ]] || explain "the end of epd: $(property Result)"
[[ -z $(there sh -c 'ls /run/epd/*.sock 2>/dev/null') ]] || explain "it left sockets: $(there ls /run/epd)"
there test -d /run/epd || explain "the directory that containers mount is gone"

# Removed while it runs; then purged.
there systemctl start epd.service
there dpkg --remove epd libepd-dev python3-epd >"$work/dpkg" 2>&1 || { cat "$work/dpkg" >&2; explain "dpkg --remove"; }
if there systemctl --quiet is-active epd.service; then explain "the removed daemon runs"; fi
there test -f /etc/epd/epd.toml || explain "remove took the configuration along"
# Installed once more, it runs as before.
there sh -c 'dpkg --install /opt/*.deb' >"$work/dpkg" 2>&1 || { cat "$work/dpkg" >&2; explain "dpkg --install after --remove"; }
eventually 20 says 'serving: 2 devices, 0 sessions, 0 groups' || explain "installed once more, epd says: $(property StatusText)"
there systemctl --quiet is-enabled epd.service || explain "installed once more, epd.service is not enabled"
there dpkg --remove epd libepd-dev python3-epd >"$work/dpkg" 2>&1 || { cat "$work/dpkg" >&2; explain "dpkg --remove"; }
there dpkg --purge epd libepd1 libepd-dev python3-epd >"$work/dpkg" 2>&1 || { cat "$work/dpkg" >&2; explain "dpkg --purge"; }
there userdel member
there userdel other
files >"$work/after"
left=$(comm -13 "$work/before" "$work/after" | grep -v -e '^/var/lib/dpkg/' -e '^/etc/\(passwd\|group\|shadow\|gshadow\|subuid\|subgid\)-$' -e '^/home' || true)
[[ -z $left ]] || explain "left behind: $left"
echo "Purged; nothing is left"
