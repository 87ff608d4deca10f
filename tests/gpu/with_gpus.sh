#!/bin/sh
# Runs a test on the GPUs of this machine: with_gpus.sh [--mps] COMMAND...
# --mps starts MPS for it if it does not run, and ends what it started. Exit 77 ("skipped") where the driver shows no
# GPU. The test sees their number in EPD_TEST_GPUS.
set -u
mps=
if [ "${1:-}" = --mps ]; then
  mps=1
  shift
fi
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ')
if [ "$gpus" -eq 0 ]; then
  echo "SKIPPED: nvidia-smi --list-gpus shows no GPU on this machine"
  exit 77
fi
EPD_TEST_GPUS=$gpus
CUDA_MODULE_LOADING=EAGER  # loading a kernel while another waits for it never ends
export EPD_TEST_GPUS CUDA_MODULE_LOADING
if [ -n "$mps" ] && ! echo get_server_list | nvidia-cuda-mps-control >/dev/null 2>&1; then
  nvidia-cuda-mps-control -d || exit 1
  trap 'echo quit | nvidia-cuda-mps-control >/dev/null' EXIT
  sleep 1
fi
"$@"
