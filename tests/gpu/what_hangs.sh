#!/bin/sh
# Says what a test that hangs is doing: operations in flight as epctl tells them, the ends of epd's and MPS's logs, then
# state and stacks of all that runs from the pack (daemon, engines, ranks) and of MPS. Takes some seconds; each process
# is stopped for a moment while its stacks are read.
# Usage: tests/gpu/what_hangs.sh DIR   (the pack: tests/gpu/pack.sh)
set -u
pack=$(cd "${1:?the pack is missing: tests/gpu/what_hangs.sh DIR}" && pwd) || exit 2

about() {  # about <pid>
  echo "== $1 $(tr '\0' ' ' < "/proc/$1/cmdline" | cut -c1-160)"
  for task in "/proc/$1/task"/*; do
    # the third field of stat after the name in brackets: R runs, S sleeps, D cannot be interrupted
    echo "${task##*/} $(cat "$task/comm") $(sed 's/.*) //' "$task/stat" | cut -d' ' -f1)" \
      "$(cat "$task/wchan" 2> /dev/null) syscall $(cut -d' ' -f1-3 "$task/syscall" 2> /dev/null)"
    head -n 3 "$task/stack" 2> /dev/null | sed 's/^/  kernel: /'
  done
  timeout 10 "$pack/bin/eu-stack" -p "$1" 2>&1
}

for folder in "${TMPDIR:-/tmp}"/epd-test-*; do
  socket=$folder/control.sock
  [ -S "$socket" ] || continue
  epctl="timeout 10 $pack/bin/epctl --socket $socket"
  for what in devices groups sessions ops; do
    echo "== epctl $what of $socket"
    $epctl $what 2>&1
  done
  for operation in $($epctl --json ops 2> /dev/null | tr ',' '\n' | sed -n 's/.*"id": *"\([^"]*\)".*/\1/p'); do
    echo "== epctl op $operation"
    $epctl op "$operation" 2>&1
  done
  echo "== $folder/epd.log"
  tail -n 60 "$folder/epd.log" 2>&1
done

for log in "${CUDA_MPS_LOG_DIRECTORY:-/var/log/nvidia-mps}"/*.log; do
  echo "== $log"
  tail -n 30 "$log" 2>&1
done

for process in /proc/[0-9]*; do
  program=$(readlink "$process/exe")
  case $program in
    "$pack"/bin/eu-stack) ;;
    "$pack"/bin/* | */nvidia-cuda-mps-*) about "${process#/proc/}" ;;
  esac
done 2> /dev/null

echo "== nvidia-smi"
timeout 10 nvidia-smi 2>&1
