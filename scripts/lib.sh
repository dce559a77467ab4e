# shellcheck shell=bash
# What the scripts share; they source this file. It leaves the working directory at the repository's root.

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
TARGET_DIR=$(mkdir -p "${CARGO_TARGET_DIR:-target}" && cd "${CARGO_TARGET_DIR:-target}" && pwd)

# say TEXT...: one line that tells where a script is.
say() {
    printf '%s\n' "$*"
}

# fail TEXT...: the last line of a script that cannot go on.
fail() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        fail "not root and no sudo: run this as root: $*"
    fi
}

# apt_install PACKAGE...: the package lists are fetched once a script.
APT_LISTS_ARE_FRESH=
apt_install() {
    command -v apt-get >/dev/null || fail "missing: $* (and no apt-get to install it with)"
    say "installing $*"
    if [ -z "$APT_LISTS_ARE_FRESH" ]; then
        as_root apt-get update -qq >/dev/null
        APT_LISTS_ARE_FRESH=yes
    fi
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# need PACKAGE COMMAND: installs PACKAGE where COMMAND is missing.
need() {
    command -v "$2" >/dev/null || apt_install "$1"
}

# What building takes: the Rust toolchain, a C compiler for zstd and ring, and a linker.
need_build_tools() {
    if ! command -v cargo >/dev/null && [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ]; then
        PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
    fi
    command -v cargo >/dev/null || fail "no cargo: install a Rust toolchain (rustup) first"
    command -v cc >/dev/null || apt_install gcc libc6-dev
    [ -e /usr/include/stdio.h ] || apt_install libc6-dev
    # Cargo fetches crates over TLS.
    [ -e /etc/ssl/certs/ca-certificates.crt ] || apt_install ca-certificates
}

# build_all: every program, library, test and example of the workspace, optimized.
build_all() {
    cargo build --release --workspace --all-targets --locked
}

# need_programs: BIN_DIR is the folder with the programs, the caller's, or else that of the one build, which is made.
need_programs() {
    if [ -z "${BIN_DIR:-}" ]; then
        need_build_tools
        build_all
        BIN_DIR=$TARGET_DIR/release
    fi
    BIN_DIR=$(cd "$BIN_DIR" && pwd)
}

# binary NAME: the path of a built program.
binary() {
    printf '%s\n' "$TARGET_DIR/release/$1"
}

# emulated_driver_dir: the folder with the emulated driver, made if need be; prints its path.
emulated_driver_dir() {
    # shellcheck disable=SC2016 # the variable is the inner shell's
    scripts/with-emulated-driver.sh sh -c 'printf "%s\n" "${LD_LIBRARY_PATH%%:*}"'
}

# python_with REQUIREMENT...: a Python with these packages, in a virtual environment beside the build; prints its path. VENV_NAME names the environment,
# where more than one set of packages is in use.
python_with() {
    local venv=$TARGET_DIR/${VENV_NAME:-venv}
    if [ "$(cat "$venv/requirements" 2>/dev/null)" != "$*" ]; then
        need python3 python3 >&2
        # Debian keeps the pip of new environments in a package of its own.
        python3 -c 'import ensurepip' 2>/dev/null || apt_install python3-venv >&2
        rm -rf "$venv"
        python3 -m venv "$venv" >&2
        "$venv/bin/pip" install --quiet --disable-pip-version-check "$@" >&2
        printf '%s\n' "$*" >"$venv/requirements"
    fi
    printf '%s\n' "$venv/bin/python"
}

# Processes that the script has started, ended one by one when it ends, last one first.
STARTED_PIDS=()

end_started() {
    local index pid
    for ((index = ${#STARTED_PIDS[@]} - 1; index >= 0; index--)); do
        pid=${STARTED_PIDS[index]}
        kill -KILL "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
}

# wait_for_line FILE PATTERN PID SECONDS: the first line of FILE that matches the extended regular expression; fails when the process
# ends or the seconds pass without one.
wait_for_line() {
    local file=$1 pattern=$2 pid=$3 tries=$(($4 * 50)) line
    while ! line=$(grep -E -m 1 -- "$pattern" "$file" 2>/dev/null); do
        if ! kill -0 "$pid" 2>/dev/null; then
            # It may have printed the line and ended in between.
            line=$(grep -E -m 1 -- "$pattern" "$file" 2>/dev/null) && break
            fail "process $pid ended before it printed a line like '$pattern'"
        fi
        [ $((tries -= 1)) -gt 0 ] || fail "no line like '$pattern' from process $pid in $4 s"
        sleep 0.02
    done
    printf '%s\n' "$line"
}

# start LOG COMMAND...: in the background, output to $DIR/LOG, pid to $STARTED; ended with the script.
start() {
    local log=$DIR/$1
    shift
    "$@" >"$log" 2>&1 </dev/null &
    STARTED=$!
    STARTED_PIDS+=("$STARTED")
}

# use_test_store: the environment for a test S3 server on this machine, with nothing of the user's own that could lead elsewhere.
use_test_store() {
    unset AWS_PROFILE AWS_SESSION_TOKEN CKPTSTREAM_CONFIG
    export AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=testtest AWS_REGION=us-east-1 AWS_EC2_METADATA_DISABLED=true
    export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1
}
