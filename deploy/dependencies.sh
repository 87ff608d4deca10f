# shellcheck shell=bash
# Sourced by the scripts beside it: the Debian packages that building needs, and functions that the scripts
# share.

# ucx-utils is not among them: only tests/bench/transport.sh and the comparison of epbench nodes need it.
EPD_PACKAGES=(
  cmake ninja-build g++ ccache pkg-config
  libstdc++-12-pic libboost-dev libgrpc++-dev libssl-dev openssl libprotobuf-dev protobuf-compiler protobuf-compiler-grpc
  prometheus-cpp-dev
  libspdlog-dev libcli11-dev libtomlplusplus-dev nlohmann-json3-dev
  libgtest-dev libgmock-dev libbenchmark-dev libucx-dev spin patchelf
  dpkg-dev mmdebstrap umoci runc
  python3 python3-numpy python3-pytest python3-venv python3-yaml
)

# Prints those of its arguments that are not installed.
missing_packages() {
  local package status
  for package in "$@"; do
    status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
    if [[ $status != installed ]]; then echo "$package"; fi
  done
}

# Installs what is missing; leaves apt alone when nothing is.
install_dependencies() {
  local missing log sudo=()
  if ! command -v dpkg-query >/dev/null; then
    echo "error: dpkg-query is missing: this script installs Debian packages. Elsewhere, install the" >&2
    echo "equivalents of: ${EPD_PACKAGES[*]} and build with cmake --preset dev." >&2
    return 1
  fi
  mapfile -t missing < <(missing_packages "${EPD_PACKAGES[@]}")
  if (( ${#missing[@]} == 0 )); then return 0; fi
  if (( EUID != 0 )); then
    if ! command -v sudo >/dev/null; then
      echo "error: not root and no sudo; install these packages first: ${missing[*]}" >&2
      return 1
    fi
    sudo=(sudo)
  fi
  echo "Installing: ${missing[*]}"
  log=$(mktemp)
  if ! { "${sudo[@]}" apt-get update &&
         "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
       } >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    echo "error: apt-get could not install the packages (its output is above)" >&2
    return 1
  fi
  rm -f "$log"
}

# quietly DESCRIPTION COMMAND...: one line when it succeeds, and what epd's CMakeLists.txt has to say; its whole
# output when it fails.
quietly() {
  local what=$1 log begin=$SECONDS
  shift
  log=$(mktemp)
  if ! "$@" >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    echo "error: $what failed (its output is above)" >&2
    return 1
  fi
  grep '^epd is built ' "$log" || true
  rm -f "$log"
  echo "$what: done in $((SECONDS - begin)) s"
}

# Compilers running at once: all cores, but no more than memory carries (2 GiB each).
build_jobs() {
  local cores gib
  cores=$(nproc)
  gib=$(awk '/^MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
  local by_memory=$(( gib / 2 > 0 ? gib / 2 : 1 ))
  echo $(( cores < by_memory ? cores : by_memory ))
}

# read_options NAME... -- "$@": the options --NAME VALUE of a packing script. Sets a variable for each, named NAME
# with _ in place of -. With --help it prints usage() and ends the script.
read_options() {
  local names=() name
  while [[ $1 != -- ]]; do names+=("--$1"); shift; done
  shift
  while (( $# > 0 )); do
    if [[ $1 == --help || $1 == -h ]]; then usage; exit 0; fi
    if [[ " ${names[*]} " != *" $1 "* ]]; then
      name=$(printf ', %s' "${names[@]}")
      echo "error: '$1'; allowed: ${name#, }" >&2
      exit 2
    fi
    if (( $# < 2 )); then echo "error: $1 needs a value" >&2; exit 2; fi
    name=${1#--}
    printf -v "${name//-/_}" '%s' "$2"
    shift 2
  done
}

# build_preset PRESET [TARGET]: builds, unless $build_dir names what was built. Sets build_dir to an absolute path.
# Needs $root.
build_preset() {
  if [[ -z $build_dir ]]; then
    install_dependencies
    build_dir=$root/build/$1
    (cd "$root" && quietly "Configuring" cmake --preset "$1")
    quietly "Building" cmake --build "$build_dir" --parallel "$(build_jobs)" ${2:+--target "$2"}
  fi
  build_dir=$(cd "$build_dir" && pwd)
}

# Sets version: that of the programs in $build_dir, "0.1.0+g229aa93f1c2d" between releases. Needs $root and $work.
build_version() {
  cached() { sed -n "s/^$1:[A-Z]*=//p" "$build_dir/CMakeCache.txt"; }
  cmake -D OUTPUT="$work/commit.h" -D SOURCE="$root" -D VERSION="$(cached CMAKE_PROJECT_VERSION)" \
    -D COMMIT="$(cached EPD_COMMIT)" -P "$root/deploy/cmake/commit.cmake"
  version=$(sed -n 's/^#define EPD_BUILD_VERSION "\(.*\)"/\1/p' "$work/commit.h")
}

# Ends the script unless all of these programs are installed.
need_tools() {
  local tool
  for tool in "$@"; do
    if ! command -v "$tool" >/dev/null; then echo "error: $tool is missing" >&2; exit 1; fi
  done
}
