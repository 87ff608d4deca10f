#!/usr/bin/env bash
# Makes an OCI image of epd. See --help.
set -euo pipefail

usage() {
  cat <<'END'
Usage: deploy/container.sh [--help] [--output FILE] [--bundle FILE] [--tag TAG] [--mirror URL]

Makes an OCI image for the daemon, MPS control and epctl: epd's bundle on a minimal Debian root. The root
is made from Debian packages, without any registry. The output is an archive of the image layout:
  skopeo copy oci-archive:FILE docker://registry.example/epd:TAG
  skopeo copy oci-archive:FILE containers-storage:localhost/epd:TAG
  ctr --namespace k8s.io images import --base-name docker.io/library/epd FILE

  --output FILE   where to write it [./epd-<version>-<arch>.oci.tar]
  --bundle FILE   of deploy/bundle.sh; without it, one is built
  --tag TAG       the image's tag [epd's version, with - for +]
  --mirror URL    where the packages come from [http://deb.debian.org/debian]

The image runs as user 64990 with a read-only root, and needs no capabilities. It writes to the directory
of its sockets only (/run/epd). NVIDIA's container runtime brings the driver and MPS control along.
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=deploy/dependencies.sh
source "$root/deploy/dependencies.sh"

output=
bundle=
tag=
mirror=http://deb.debian.org/debian
read_options output bundle tag mirror -- "$@"

fail() { echo "error: $1" >&2; exit 1; }

if (( EUID != 0 )); then fail "only root can make the image's root; run it with sudo, or in a user namespace"; fi
for tool in mmdebstrap umoci; do
  command -v "$tool" >/dev/null || fail "$tool is missing (package $tool)"
done

work=$(mktemp -d "${TMPDIR:-/tmp}/epd-container-XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
umask 022

if [[ -z $bundle ]]; then
  bundle=$work/epd.tar.gz
  "$root/deploy/bundle.sh" --output "$bundle"
fi
[[ -f $bundle ]] || fail "--bundle '$bundle' is no file"
name=$(tar --list --file "$bundle" | sed -n '1s|/.*||p')  # epd-<version>-<arch>
[[ $name == epd-*-* ]] || fail "--bundle '$bundle' is not of deploy/bundle.sh: it holds '$name'"
version=${name#epd-}
arch=${version##*-}
version=${version%-*}
case $arch in
  x86_64) platform=amd64 ;;
  aarch64) platform=arm64 ;;
  *) fail "the bundle is for '$arch'; allowed: x86_64, aarch64" ;;
esac
tag=${tag:-${version//+/-}}
[[ $tag =~ ^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$ ]] || fail "--tag '$tag'; allowed: letters, digits, '_', '.', '-', at most 128"
output=${output:-$PWD/epd-$version-$arch.oci.tar}

# The C library, busybox as a shell for probes and people, and what says that this is Debian. Nothing is run in it.
debian=$work/debian
if ! timeout 300 mmdebstrap --quiet --variant=extract --include=base-files,libc6,busybox --architectures="$platform" \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --aptopt='Acquire::Languages "none"' bookworm "$debian" "$mirror" >"$work/log" 2>&1; then
  cat "$work/log" >&2
  fail "mmdebstrap could make no root from $mirror (its output is above)"
fi
rm -rf "$debian"/var/lib/apt "$debian"/var/cache/apt "$debian"/etc/apt
for applet in sh cat chmod chown cp df env grep head id kill ls mkdir ps rm sed sleep stat tail top; do
  ln -s busybox "$debian/bin/$applet"
done
printf '%s\n' root:x:0:0:root:/root:/bin/sh epd:x:64990:64990:epd:/:/bin/sh >"$debian/etc/passwd"
printf '%s\n' root:x:0: epd:x:64990: >"$debian/etc/group"

# The bundle keeps together; its programs are found by PATH.
epd=$work/epd
mkdir -p "$epd/opt" "$epd/usr/bin" "$epd/etc/epd" "$epd/run/epd"
tar --extract --no-same-owner --file "$bundle" --directory "$epd/opt"
mv "$epd/opt/$name" "$epd/opt/epd"
cp "$epd/opt/epd/etc/epd/epd.toml" "$epd/etc/epd/epd.toml"
for program in "$epd"/opt/epd/bin/*; do ln -s "/opt/epd/bin/$(basename "$program")" "$epd/usr/bin/"; done
chown 64990:64990 "$epd/run/epd"

image=$work/layout:$tag
commit=$(git -C "$root" rev-parse HEAD 2>/dev/null || true)
umoci init --layout "$work/layout"
umoci new --image "$image"
umoci config --image "$image" --architecture "$platform" --os linux --author "The authors of epd" \
  --config.user 64990:64990 --config.workingdir / --config.stopsignal SIGTERM \
  --config.env PATH=/usr/bin:/bin --clear=config.entrypoint --config.entrypoint epd \
  --config.cmd serve --config.cmd --config --config.cmd /etc/epd/epd.toml \
  --config.volume /run/epd \
  --config.label org.opencontainers.image.title=epd \
  --config.label "org.opencontainers.image.description=Expert-parallel communication daemon" \
  --config.label "org.opencontainers.image.version=$version" \
  --config.label "org.opencontainers.image.revision=$commit" \
  --config.label org.opencontainers.image.licenses=Apache-2.0
for layer in "$debian" "$epd"; do umoci insert --image "$image" "$layer" /; done
umoci gc --layout "$work/layout"
tar --create --file "$output" --directory "$work/layout" --sort=name --owner=0 --group=0 --numeric-owner .
unpacked=$(du --summarize --total --block-size=1M "$debian" "$epd" | awk 'END {print $1}')
echo "$output: epd:$tag, $(du --block-size=1M "$output" | cut -f1) MB packed, $unpacked MB unpacked"
