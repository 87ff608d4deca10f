#!/bin/sh
# Runs a Python program of this folder on GPUs, beside a daemon of its own: python.sh BIN LIBRARY PROGRAM [OPTIONS]
# BIN has epd and epctl. MPS runs already, or there is none. Ranks share GPUs where there are fewer. Exit 77
# ("skipped") where torch is missing or sees no GPU. EPD_TEST_DEVICES="--devices.cuda none --devices.host 2": on host devices instead.
set -u
here=$(cd "$(dirname "$0")" && pwd)
bin=$1
library=$2
program=$3
shift 3
devices=${EPD_TEST_DEVICES:---devices.host 0}
if ! python3 -c 'import torch' 2> /dev/null; then
  echo "SKIPPED: python3 has no torch"
  exit 77
fi
if [ -z "${EPD_TEST_DEVICES:-}" ]; then
  gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
  if [ "$gpus" -lt 1 ]; then
    echo "SKIPPED: torch sees no GPU"
    exit 77
  fi
fi
work=$(mktemp -d)
export EPD_LIBRARY="$library" EPD_SOCKET="$work/epd.sock" EPD_CONTROL_SOCKET="$work/control.sock"
export EPD_BIN="$bin"
export PYTHONPATH="$here/../../client/python:$here/../../client/deep_ep" PYTHONDONTWRITEBYTECODE=1
# shellcheck disable=SC2086
"$bin/epd" serve --daemon.socket "$EPD_SOCKET" --daemon.control_socket "$EPD_CONTROL_SOCKET" $devices \
  > "$work/epd.log" 2>&1 &
daemon=$!
end() {
  kill "$daemon" 2> /dev/null
  wait "$daemon"
  rm -rf "$work"
}
trap end EXIT
trap 'exit 1' TERM INT
tries=0
until "$bin/epctl" status > /dev/null 2>&1; do
  tries=$((tries + 1))
  if [ "$tries" -gt 300 ] || ! kill -0 "$daemon" 2> /dev/null; then
    cat "$work/epd.log"
    exit 1
  fi
  sleep 0.1
done
python3 "$here/$program" "$@"
status=$?
[ "$status" -eq 0 ] || tail -n 40 "$work/epd.log"
exit "$status"
