#!/usr/bin/env bash
# How long it takes from a notice to the driver's lock, and to the commit, under `ckptstream run`: armed (`preempt.contexts = "eager"`) and not, in turns, with an emulated driver whose cuInit takes 3 s.
#
# usage: bench-notice.sh [RUNS]     of each kind (5); medians are printed
# GPUs and S3 server are emulated, on the same processors: what is measured is ckptstream's own part. BIN_DIR=… takes programs that are built already; else it makes the one build.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

RUNS=${1:-5}
GPU_COUNT=2
GPU_MIB=64
CU_INIT_MS=3000

need_programs
DIR=$(mktemp -d)
clean_up() {
    local status=$?
    trap - EXIT
    end_started
    if [ "$status" -ne 0 ]; then
        tail -n 20 "$DIR"/*.log >&2 || true
    fi
    rm -rf "$DIR"
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT TERM HUP
use_test_store
EMULATED_CUDA_LIB=$BIN_DIR/libemulated_cuda.so
export EMULATED_CUDA_LIB

start s3.log "$BIN_DIR/testkit" s3 --addr 127.0.0.1:0 --bucket ckpt
ENDPOINT=$(wait_for_line "$DIR/s3.log" '^listening ' "$STARTED" 10)
ENDPOINT=${ENDPOINT#listening }

# measure KIND NUMBER: one job, one notice; appends "lock commit" in seconds to $DIR/KIND.
measure() {
    local job=$1-$2 log=$1-$2.log waits_for='^step 5 '
    cat >"$DIR/$job.toml" <<TOML
[job]
name = "$job"
restore_command = ["true"]
state_dir = "$DIR/state"
[store]
url = "s3://ckpt/bench"
endpoint = "$ENDPOINT"
[preempt]
contexts = "$1"
[metrics]
textfile = "$DIR/$job.prom"
TOML
    EMULATED_CUDA="gpus=$GPU_COUNT;memory=1GiB;node=$$;fault=cuInit#1=stall:$CU_INIT_MS" \
        start "$log" scripts/with-emulated-driver.sh "$BIN_DIR/ckptstream" run --config "$DIR/$job.toml" --progress none -- \
        "$BIN_DIR/testkit" target --gpus "$GPU_COUNT" --bytes "${GPU_MIB}MiB" --seed 1 --step-ms 20
    local pid=$STARTED code=0
    wait_for_line "$DIR/$log" "$waits_for" "$pid" 60 >/dev/null
    if [ "$1" = eager ]; then
        until "$BIN_DIR/ckptstream" status --socket "$DIR/state/$job.sock" | grep -q '^armed *yes'; do sleep 0.05; done
    fi
    kill -TERM "$pid"
    wait "$pid" || code=$?
    [ "$code" -eq 75 ] || fail "run ended with $code"
    awk '/^ckptstream_notice_to_lock_seconds/ {lock=$2} /^ckptstream_notice_to_commit_seconds/ {print lock, $2}' "$DIR/$job.prom" >>"$DIR/$1"
}

# median COLUMN FILE, in milliseconds
median() {
    awk -v column="$1" '{print $column * 1000}' "$2" | sort -g | awk '{v[NR]=$1} END {printf "%.1f", (v[int((NR+1)/2)]+v[int((NR+2)/2)])/2}'
}

for ((number = 1; number <= RUNS; number++)); do
    measure eager "$number"
    measure at-notice "$number"
done
say "notice to lock and to commit, $GPU_COUNT emulated GPUs x $GPU_MIB MiB, cuInit takes $CU_INIT_MS ms, medians of $RUNS, in ms:"
say "| preempt.contexts | to the lock | slowest | to the commit |"
say "|---|---|---|---|"
for kind in eager at-notice; do
    slowest=$(awk '{print $1 * 1000}' "$DIR/$kind" | sort -g | tail -n 1)
    say "| $kind | $(median 1 "$DIR/$kind") | $slowest | $(median 2 "$DIR/$kind") |"
done
