#!/usr/bin/env bash
# Whole process trees on a real GPU whose driver lacks custom storage (NVIDIA 570 to 13.3's), through host memory and CRIU:
#   1. a PyTorch training job under `ckptstream run` gets SIGTERM at a random step, is saved to the test S3 server and ended, and is restored by the next `run`: its losses have to be those of an undisturbed run, bit for bit.
#      Once by itself, once with two data loader workers, and once as two such processes in one tree, which share the GPU.
#   2. a process with BYTES of weights-like GPU memory is saved, ended and restored: seconds per phase;
#   3. the same process by what there is without ckptstream, on the same machine: the driver's checkpoint to host memory, `criu dump` to a local disk, `s5cmd cp` to the same server.
#
# usage: gpu-whole.sh [BYTES]     24GiB if not said
# Needs root, python3 with PyTorch, and CRIU (scripts/install-criu.sh, or CRIU=PROGRAM). BIN_DIR names the folder with the programs, COMMIT the commit they were built from, S5CMD a program for step 3, OUT a folder for the losses.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

BYTES=${1:-24GiB}
need_programs
CRIU=${CRIU:-$(scripts/install-criu.sh)}
CKPTSTREAM=$BIN_DIR/ckptstream
TESTKIT=$BIN_DIR/testkit
DIR=$(mktemp -d)
OUT=${OUT:-$DIR}
trap 'end_started; rm -rf "$DIR"' EXIT
use_test_store

say "date: $(date -u +%Y-%m-%dT%H:%M:%SZ)"
say "commit: ${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
say "host: $(nproc) cores, $(awk '/^model name/ {sub(/.*: /, ""); print; exit}' /proc/cpuinfo), kernel $(uname -r)"
nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv
say "$("$CRIU" --version | head -n 1), PyTorch $(python3 -c 'import torch; print(torch.__version__)')"

start s3.log "$TESTKIT" s3 --addr 127.0.0.1:0 --bucket ckpt
ENDPOINT=$(wait_for_line "$DIR/s3.log" '^listening ' "$STARTED" 10)
ENDPOINT=${ENDPOINT#listening }

# config JOB: the configuration of a job; prints its path.
config() {
    cat >"$DIR/$1.toml" <<END
[job]
name = "$1"
state_dir = "$DIR/state"
[store]
url = "s3://ckpt/whole"
endpoint = "$ENDPOINT"
[host]
criu = "$CRIU"
END
    printf '%s\n' "$DIR/$1.toml"
}

STEPS=150

# pre_empted NAME WORKERS: trains under `run`, with one pre-emption at a random step; prints what happened.
pre_empted() {
    local name=$1 workers=$2 at=$((20 + RANDOM % 80)) status=0 job file=$OUT/losses-$1.txt
    job=$(config "$name")
    "$CKPTSTREAM" run --config "$job" --progress none -- python3 "$ROOT/scripts/train.py" "$STEPS" "$workers" >"$file" 2>"$DIR/$name.log" </dev/null &
    STARTED_PIDS+=("$!")
    local run=$!
    wait_for_line "$file" "^step $at " "$run" 120 >/dev/null
    kill -TERM "$run"
    wait "$run" || status=$?
    [ "$status" -eq 75 ] || { cat "$DIR/$name.log"; fail "$name: run ended with $status; 75 was expected"; }
    say "  SIGTERM at step $at, saved and ended after step $(grep -c '^step ' "$file"): exit 75"
    status=0
    "$CKPTSTREAM" run --config "$job" --progress none -- python3 "$ROOT/scripts/train.py" "$STEPS" "$workers" >>"$file" 2>>"$DIR/$name.log" </dev/null || status=$?
    { [ "$status" -eq 0 ] && grep '^done$' "$file" >/dev/null; } || { cat "$DIR/$name.log"; fail "$name: the second run ended with $status"; }
    grep -E 'image|restored' "$DIR/$name.log" | sed 's/^/  /' || true
    "$CKPTSTREAM" list --config "$job" | sed 's/^/  /'
    if cmp <(grep '^step ' "$OUT/losses-alone.txt") <(grep '^step ' "$file"); then
        say "  all $STEPS losses are those of the undisturbed run, bit for bit"
    else
        fail "$name: the losses differ"
    fi
}

say ""
say "1. training: undisturbed"
python3 scripts/train.py "$STEPS" >"$OUT/losses-alone.txt"
say "  $(grep '^step ' "$OUT/losses-alone.txt" | tail -n 1)"
say "1a. pre-empted"
pre_empted alone-pre-empted 0
say "1b. pre-empted, with 2 data loader workers"
pre_empted workers-pre-empted 2

# Two trainings in one tree; each writes to a file of its own.
pair_pre_empted() {
    local at=$((20 + RANDOM % 80)) status=0 job a=$OUT/losses-pair-a.txt b=$OUT/losses-pair-b.txt
    job=$(config pair)
    printf '#!/bin/sh\npython3 %s %s 0 >>%s &\npython3 %s %s 0 >>%s &\nwait\n' "$ROOT/scripts/train.py" "$STEPS" "$a" "$ROOT/scripts/train.py" "$STEPS" "$b" >"$DIR/pair.sh"
    : >"$a"
    : >"$b"
    "$CKPTSTREAM" run --config "$job" --progress none -- sh "$DIR/pair.sh" >/dev/null 2>"$DIR/pair.log" </dev/null &
    STARTED_PIDS+=("$!")
    local run=$!
    wait_for_line "$a" "^step $at " "$run" 120 >/dev/null
    kill -TERM "$run"
    wait "$run" || status=$?
    [ "$status" -eq 75 ] || { cat "$DIR/pair.log"; fail "pair: run ended with $status; 75 was expected"; }
    say "  SIGTERM at step $at, saved and ended after steps $(grep -c '^step ' "$a") and $(grep -c '^step ' "$b"): exit 75"
    status=0
    "$CKPTSTREAM" run --config "$job" --progress none -- sh "$DIR/pair.sh" >/dev/null 2>>"$DIR/pair.log" </dev/null || status=$?
    [ "$status" -eq 0 ] || { cat "$DIR/pair.log"; fail "pair: the second run ended with $status"; }
    "$CKPTSTREAM" list --config "$job" | sed 's/^/  /'
    for file in "$a" "$b"; do
        cmp <(grep '^step ' "$OUT/losses-alone.txt") <(grep '^step ' "$file") || { cat "$DIR/pair.log"; fail "pair: the losses differ"; }
    done
    say "  all $STEPS losses of both are those of the undisturbed run, bit for bit"
}

say "1c. two processes that share the GPU, pre-empted"
pair_pre_empted

# hold NAME: a process with BYTES of GPU memory, in a session of its own; its pid in HELD.
hold() {
    start "$1.log" setsid "$TESTKIT" target --gpus 1 --bytes "$BYTES" --fill weights --seed 7 --step-ms 200
    wait_for_line "$DIR/$1.log" '^step 2 ' "$STARTED" 300 >/dev/null
    HELD=$(sed -n 's/^ready pid //p' "$DIR/$1.log")
}

# seconds COMMAND...: how long it takes, in SECONDS_TAKEN; its output goes to $DIR/timed.log.
seconds() {
    local before after
    before=$(date +%s.%N)
    "$@" >"$DIR/timed.log" 2>&1 || { cat "$DIR/timed.log"; fail "it failed: $*"; }
    after=$(date +%s.%N)
    SECONDS_TAKEN=$(awk -v a="$before" -v b="$after" 'BEGIN { printf "%.2f", b - a }')
}

say ""
say "2. $BYTES of weights-like GPU memory, by ckptstream"
JOB=$(config held)
hold held
seconds "$CKPTSTREAM" checkpoint --pid "$HELD" --config "$JOB" --progress none
sed 's/^/  /' "$DIR/timed.log"
say "  saved and ended: $SECONDS_TAKEN s"
BEFORE=$(grep '^step ' "$DIR/held.log" | tail -n 1)
seconds "$CKPTSTREAM" restore --config "$JOB" --progress none
sed 's/^/  /' "$DIR/timed.log"
say "  runs again: $SECONDS_TAKEN s"
say "  the last step before: $BEFORE"
HELD=$(sed -n 's/^target *pid \([0-9]*\) running$/\1/p' "$DIR/timed.log")
LAST=$(($(printf '%s' "$BEFORE" | cut -d' ' -f2) + 2))
wait_for_line "$DIR/held.log" "^step $LAST " "$HELD" 120 >"$DIR/later"
kill -KILL "$HELD"
hold undisturbed
wait_for_line "$DIR/undisturbed.log" "^step $LAST " "$HELD" 120 >"$DIR/expected"
kill -KILL "$HELD"
cmp "$DIR/later" "$DIR/expected" || fail "the restored process computes other digests"
say "  it computes on, as a process that nobody disturbed does: $(cat "$DIR/later")"

if [ -n "${S5CMD:-}" ]; then
    say ""
    say "3. the same without ckptstream: the driver to host memory, criu dump to a disk, s5cmd cp"
    hold plain
    mkdir "$DIR/dump"
    seconds python3 scripts/stage.py out "$HELD"
    say "  driver, host memory: $SECONDS_TAKEN s"
    TOTAL=$SECONDS_TAKEN
    seconds "$CRIU" dump --images-dir "$DIR/dump" --tree "$HELD" --libdir "$DIR" --timeout 600
    say "  criu dump: $SECONDS_TAKEN s"
    TOTAL=$(awk -v a="$TOTAL" -v b="$SECONDS_TAKEN" 'BEGIN { printf "%.2f", a + b }')
    seconds "$S5CMD" --endpoint-url "$ENDPOINT" cp --concurrency 16 --part-size 64 "$DIR/dump/" s3://ckpt/plain/
    say "  s5cmd cp: $SECONDS_TAKEN s"
    TOTAL=$(awk -v a="$TOTAL" -v b="$SECONDS_TAKEN" 'BEGIN { printf "%.2f", a + b }')
    say "  saved: $TOTAL s, $(du -sb "$DIR/dump" | cut -f1) bytes"
    rm -rf "$DIR/dump"
    mkdir "$DIR/dump"
    seconds "$S5CMD" --endpoint-url "$ENDPOINT" cp --concurrency 16 --part-size 64 's3://ckpt/plain/*' "$DIR/dump/"
    say "  s5cmd cp back: $SECONDS_TAKEN s"
    TOTAL=$SECONDS_TAKEN
    seconds "$CRIU" restore --images-dir "$DIR/dump" --libdir "$DIR" --restore-detached
    say "  criu restore: $SECONDS_TAKEN s"
    TOTAL=$(awk -v a="$TOTAL" -v b="$SECONDS_TAKEN" 'BEGIN { printf "%.2f", a + b }')
    seconds python3 scripts/stage.py in "$HELD"
    say "  driver, back to the GPU: $SECONDS_TAKEN s"
    say "  runs again: $(awk -v a="$TOTAL" -v b="$SECONDS_TAKEN" 'BEGIN { printf "%.2f", a + b }') s"
    kill -KILL "$HELD"
fi
say "gpu-whole: OK"
