#!/usr/bin/env bash
# Makes a test CA and the certificates of nodes. See --help.
set -euo pipefail

usage() {
  cat <<'END'
Usage: deploy/test-ca.sh [--help] [--days N] DIR NODE...

Makes DIR/ca.pem (if it is missing), and for each NODE DIR/NODE.pem and DIR/NODE.key, which that CA has signed:
what cluster.tls_ca, tls_cert and tls_key of epd want. Certificates that exist are replaced; each file appears whole.

  NODE      name[,name or address]...: cluster.node, then the other names and addresses under which the
            certificate is good. That of the coordinator must have the host of cluster.coordinator.
  --days N  how long certificates are valid (90; the CA ten times as long); 0: they have expired already

The key of the CA lies beside them: for tests, not for a cluster that somebody may attack.

  deploy/test-ca.sh /tmp/ca node-a,127.0.0.1 node-b,127.0.0.1

Exit status: 0 made, 1 failed, 2 wrong usage, 77 openssl is missing.
END
}

wrong() {
  echo "test-ca.sh: $1" >&2
  exit 2
}

days=90
arguments=()
while (( $# != 0 )); do
  case $1 in
    --help | -h) usage; exit 0 ;;
    --days)
      (( $# >= 2 )) || wrong "--days has no value; allowed: 0..99999"
      [[ $2 =~ ^(0|[1-9][0-9]{0,4})$ ]] || wrong "--days is \"$2\"; allowed: 0..99999"
      days=$2
      shift
      ;;
    -*) wrong "unknown option \"$1\"; allowed: --help, --days" ;;
    *) arguments+=("$1") ;;
  esac
  shift
done
(( ${#arguments[@]} >= 2 )) || wrong "DIR and at least one NODE are needed; see --help"
if ! command -v openssl >/dev/null; then echo "skipped: openssl is not installed"; exit 77; fi

dir=${arguments[0]}
mkdir -p "$dir"
umask 077
work=$(mktemp -d "$dir/.work.XXXXXX")
trap 'rm -rf "$work"' EXIT

# openssl says what it does on standard error, and why it failed.
silently() {
  if ! "$@" 2>"$work/log"; then cat "$work/log" >&2; exit 1; fi
}

new_key() {
  silently openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"
}

if [[ ! -e $dir/ca.pem ]]; then
  new_key "$work/ca.key"
  silently openssl req -new -x509 -key "$work/ca.key" -subj "/CN=epd test CA" -days $(( days * 10 + 1 )) \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign -out "$work/ca.pem"
  mv "$work/ca.key" "$dir/ca.key"
  mv "$work/ca.pem" "$dir/ca.pem"
fi

for node in "${arguments[@]:1}"; do
  IFS=, read -ra names <<<"$node"
  name=${names[0]}
  alternatives=
  for one in "${names[@]}"; do
    kind=DNS
    if [[ $one =~ ^[0-9.]+$ || $one == *:* ]]; then kind=IP; fi
    alternatives+=${alternatives:+,}$kind:$one
  done
  cat >"$work/extensions" <<END
basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
extendedKeyUsage=serverAuth,clientAuth
subjectAltName=$alternatives
END
  new_key "$work/key"
  silently openssl req -new -key "$work/key" -subj "/CN=$name" -out "$work/request"
  # openssl makes none that has expired; days=0 ends it in the second in which it begins.
  silently openssl x509 -req -in "$work/request" -CA "$dir/ca.pem" -CAkey "$dir/ca.key" -set_serial "0x$(openssl rand -hex 16)" \
    -days "$days" -extfile "$work/extensions" -out "$work/pem"
  mv "$work/key" "$dir/$name.key"
  mv "$work/pem" "$dir/$name.pem"
done
