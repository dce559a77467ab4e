#!/usr/bin/env bash
# What the handler does with a notice, and what it costs until there is one, under `ckptstream run` and `watch`:
# - from the notice to the driver's lock, and to the commit: armed (`preempt.contexts = "eager"`) and not, in turns, with an emulated driver whose cuInit takes 3 s;
# - from the return of the driver's checkpoint call to the first part at the server, beside the time that the part's bytes take to be copied from the GPU;
# - waiting: CPU time, memory, calls of the driver, and the steps of a job that is watched over beside those of one that is not, in turns.
#
# usage: bench-notice.sh [RUNS [IDLE_S]]     of each kind (5), and seconds of each wait (60); medians are printed
# GPUs and S3 server are emulated, on the same processors: what is measured is ckptstream's own part. BIN_DIR=… takes programs that are built already; else it makes the one build. Needs python3.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

RUNS=${1:-5}
IDLE_S=${2:-60}
GPU_COUNT=2
GPU_MIB=64
CU_INIT_MS=3000
# Of each GPU, so that the first part takes some time.
COPY_MIB_S=1024
TO_MIB=$(awk 'BEGIN {print 1 / 1048576}')

need_programs
need python3 python3
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

start s3.log "$BIN_DIR/testkit" s3 --addr 127.0.0.1:0 --bucket ckpt --log "$DIR/requests.jsonl"
ENDPOINT=$(wait_for_line "$DIR/s3.log" '^listening ' "$STARTED" 10)
ENDPOINT=${ENDPOINT#listening }

# configure JOB CONTEXTS [LINE...]: writes $DIR/JOB.toml.
configure() {
    cat >"$DIR/$1.toml" <<TOML
[job]
name = "$1"
restore_command = ["true"]
state_dir = "$DIR/state"
[store]
url = "s3://ckpt/bench"
endpoint = "$ENDPOINT"
[preempt]
contexts = "$2"
TOML
    printf '%s\n' "${@:3}" >>"$DIR/$1.toml"
}

# wait_until_armed JOB
wait_until_armed() {
    until "$BIN_DIR/ckptstream" status --socket "$DIR/state/$1.sock" 2>/dev/null | grep -q '^armed *yes'; do sleep 0.05; done
}

# run_and_notify JOB DRIVER FLAG...: the job with these flags under `run`, whose driver has these settings, and one notice.
run_and_notify() {
    local job=$1
    EMULATED_CUDA="gpus=$GPU_COUNT;memory=1GiB;node=$$;$2" \
        start "$job.log" scripts/with-emulated-driver.sh "$BIN_DIR/ckptstream" run --config "$DIR/$job.toml" --progress none -- \
        "$BIN_DIR/testkit" target --gpus "$GPU_COUNT" --bytes "${GPU_MIB}MiB" --seed 1 --step-ms 20 "${@:3}"
    local pid=$STARTED code=0
    wait_for_line "$DIR/$job.log" '^step 5 ' "$pid" 60 >/dev/null
    if ! grep -q '^contexts = "at-notice"' "$DIR/$job.toml"; then
        wait_until_armed "$job"
    fi
    kill -TERM "$pid"
    wait "$pid" || code=$?
    [ "$code" -eq 75 ] || fail "run ended with $code"
}

# measure KIND NUMBER: appends "lock commit" in seconds to $DIR/KIND.
measure() {
    local job=$1-$2
    configure "$job" "$1" '[metrics]' "textfile = \"$DIR/$job.prom\""
    run_and_notify "$job" "fault=cuInit#1=stall:$CU_INIT_MS"
    awk '/^ckptstream_notice_to_lock_seconds/ {lock=$2} /^ckptstream_notice_to_commit_seconds/ {print lock, $2}' "$DIR/$job.prom" >>"$DIR/$1"
}

# first_part NUMBER: appends "copied sent bytes" in milliseconds after the checkpoint call to $DIR/first-part. No byte of the job can be compressed.
first_part() {
    local job=first-part-$1
    configure "$job" eager
    run_and_notify "$job" "d2h=${COPY_MIB_S}MiB;trace=$DIR/$job.jsonl" --fill random
    python3 scripts/bench/notice.py first-part "$DIR/$job.jsonl" "$DIR/requests.jsonl" >>"$DIR/first-part"
    rm "$DIR/$job.jsonl"
}

# idle NUMBER WATCHED ALONE: `watch` waits beside these two of the jobs `a` and `b`; appends what notice.py prints to $DIR/idle.
idle() {
    local trace=$DIR/idle-$1.jsonl watched_pid
    watched_pid=$(cat "$DIR/$2.pid")
    EMULATED_CUDA="$NODE;trace=$trace" start "idle-$1.log" scripts/with-emulated-driver.sh "$BIN_DIR/ckptstream" watch --config "$DIR/$2.toml" --pid "$watched_pid" --progress none
    local pid=$STARTED
    wait_until_armed "$2"
    "$BIN_DIR/ckptstream" status --socket "$DIR/state/$2.sock" --json >"$DIR/status.json"
    python3 scripts/bench/notice.py idle "$IDLE_S" "$pid" "$trace" "$DIR/status.json" "$DIR/$2.log" "$DIR/$3.log" >>"$DIR/idle"
    # A signal that it hears would be a notice.
    kill -KILL "$pid"
    { wait "$pid" || true; } 2>/dev/null
}

# median COLUMN FILE [FACTOR], in milliseconds where the file has seconds
median() {
    awk -v column="$1" -v factor="${3:-1000}" '{print $column * factor}' "$2" | sort -g | awk '{v[NR]=$1} END {printf "%.1f", (v[int((NR+1)/2)]+v[int((NR+2)/2)])/2}'
}

# greatest COLUMN FILE [FACTOR]
greatest() {
    awk -v column="$1" -v factor="${3:-1000}" '{print $column * factor}' "$2" | sort -g | tail -n 1
}

# median_and_range COLUMN FILE: of numbers as they stand.
median_and_range() {
    printf '%s (%.1f to %.1f)' "$(median "$1" "$2" 1)" "$(greatest "$1" "$2" -1 | awk '{print -$1}')" "$(greatest "$1" "$2" 1)"
}

for ((number = 1; number <= RUNS; number++)); do
    measure eager "$number"
    measure at-notice "$number"
done
say "notice to lock and to commit, $GPU_COUNT emulated GPUs x $GPU_MIB MiB, cuInit takes $CU_INIT_MS ms, medians of $RUNS, in ms:"
say "| preempt.contexts | to the lock | slowest | to the commit |"
say "|---|---|---|---|"
for kind in eager at-notice; do
    say "| $kind | $(median 1 "$DIR/$kind") | $(greatest 1 "$DIR/$kind") | $(median 2 "$DIR/$kind") |"
done

for ((number = 1; number <= RUNS; number++)); do
    first_part "$number"
done
say ""
say "from the return of the driver's checkpoint call, $GPU_COUNT emulated GPUs x $GPU_MIB MiB of random bytes that are copied with $COPY_MIB_S MiB/s each, a first part of $(median 3 "$DIR/first-part" "$TO_MIB") MiB, medians of $RUNS, in ms:"
say "| the copy at this rate alone | its bytes are copied | its request is at the server | slowest |"
say "|---|---|---|---|"
say "| $(median 3 "$DIR/first-part" "$(awk -v rate="$COPY_MIB_S" 'BEGIN {print 1000 / rate / 1048576}')") | $(median 1 "$DIR/first-part" 1) | $(median 2 "$DIR/first-part" 1) | $(greatest 2 "$DIR/first-part" 1) |"

NODE="gpus=$GPU_COUNT;memory=1GiB;node=$$"
for job in a b; do
    configure "$job" eager
    EMULATED_CUDA=$NODE start "$job.log" scripts/with-emulated-driver.sh "$BIN_DIR/testkit" target --gpus "$GPU_COUNT" --bytes "${GPU_MIB}MiB" --seed 1 --step-ms 20 --digest-every 0
    printf '%s\n' "$STARTED" >"$DIR/$job.pid"
    wait_for_line "$DIR/$job.log" '^step 5' "$STARTED" 60 >/dev/null
done
for ((number = 1; number <= RUNS; number++)); do
    if ((number % 2)); then idle "$number" a b; else idle "$number" b a; fi
done
say ""
say "waiting for a notice, armed, $IDLE_S s each, two jobs of $GPU_COUNT emulated GPUs x $GPU_MIB MiB side by side of which one is watched over, in turns, medians of $RUNS:"
say "| CPU time of the handler, ms, in ticks of 10 | greatest | its resident memory, MiB | of that pinned, MiB | looks at the job's state | other calls of the driver | steps/s, watched over | steps/s, alone | % of the other |"
say "|---|---|---|---|---|---|---|---|---|"
say "| $(median 1 "$DIR/idle") | $(greatest 1 "$DIR/idle") | $(median 2 "$DIR/idle" "$TO_MIB") | $(median 3 "$DIR/idle" "$TO_MIB") | $(median 4 "$DIR/idle" 1) | $(greatest 5 "$DIR/idle" 1) | $(median_and_range 6 "$DIR/idle") | $(median_and_range 7 "$DIR/idle") | $(median_and_range 8 "$DIR/idle") |"
