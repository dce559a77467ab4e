#!/usr/bin/env bash
# What can be proven on a real GPU whose driver lacks custom storage (NVIDIA 570 to 13.3's):
#   1. `checkpoint` on a real CUDA process refuses with exit 3, names the driver's version and the one needed, and the process computes on;
#   2. `bench` moves real GPU memory through the whole pipeline into the test S3 server and back, compares every byte, and leaves nothing there.
# With a newer driver step 1 is the whole road instead: checkpoint, kill, restore into a fresh process.
#
# usage: gpu-check.sh [BYTES]     how much GPU memory step 2 moves, 16GiB if not said
# Uses the release build if there is one (the GPU machine may have no Rust), else makes it. BIN_DIR names another folder with the programs,
# COMMIT the commit that they were built from, for a machine that has no repository.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

BYTES=${1:-16GiB}
BIN_DIR=${BIN_DIR:-$TARGET_DIR/release}
if [ ! -x "$BIN_DIR/ckptstream" ]; then
    need_build_tools
    build_all
fi
CKPTSTREAM=$BIN_DIR/ckptstream
TESTKIT=$BIN_DIR/testkit
DIR=$(mktemp -d)
trap 'end_started; rm -rf "$DIR"' EXIT
use_test_store

say "date: $(date -u +%Y-%m-%dT%H:%M:%SZ)"
say "commit: ${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
say "host: $(nproc) cores, $(awk '/^model name/ {sub(/.*: /, ""); print; exit}' /proc/cpuinfo)"
nvidia-smi --query-gpu=index,name,uuid,memory.total,driver_version --format=csv

start s3.log "$TESTKIT" s3 --addr 127.0.0.1:0 --bucket ckpt
ENDPOINT=$(wait_for_line "$DIR/s3.log" '^listening ' "$STARTED" 10)
ENDPOINT=${ENDPOINT#listening }

say ""
say "1. checkpoint of a real CUDA process"
start job.log "$TESTKIT" target --gpus 1 --bytes 256MiB --fill mixed --seed 7 --step-ms 100
JOB_PID=$STARTED
wait_for_line "$DIR/job.log" '^step 3 ' "$JOB_PID" 60 | sed 's/^/  job: /'
say "  \$ ckptstream preflight --pid $JOB_PID"
# Exit 3 where the driver lacks custom storage, which it says.
"$CKPTSTREAM" preflight --pid "$JOB_PID" --job gpu-check --store s3://ckpt/check --endpoint "$ENDPOINT" --progress none 2>/dev/null | sed 's/^/  /' || true
STATUS=0
"$CKPTSTREAM" checkpoint --pid "$JOB_PID" --job gpu-check --store s3://ckpt/check --endpoint "$ENDPOINT" --progress none >"$DIR/out.log" 2>&1 || STATUS=$?
sed 's/^/  /' "$DIR/out.log"
say "  exit $STATUS"
if [ "$STATUS" -eq 3 ]; then
    grep -q '13\.4' "$DIR/out.log" || fail "the refusal does not name the version that is needed"
    BEFORE=$(grep -c '^step ' "$DIR/job.log")
    wait_for_line "$DIR/job.log" "^step $((BEFORE + 5)) " "$JOB_PID" 60 | sed 's/^/  the process computes on: /'
    kill -TERM "$JOB_PID"
elif [ "$STATUS" -eq 0 ]; then
    kill -KILL "$JOB_PID"
    start fresh.log "$TESTKIT" target --gpus 1 --bytes 256MiB --fill mixed --seed 7 --step-ms 100 --suspended
    FRESH_PID=$STARTED
    wait_for_line "$DIR/fresh.log" '^suspended pid ' "$FRESH_PID" 60 | sed 's/^/  fresh process: /'
    "$CKPTSTREAM" restore --pid "$FRESH_PID" --into-fresh --job gpu-check --store s3://ckpt/check --endpoint "$ENDPOINT" --progress none | sed 's/^/  /'
    wait_for_line "$DIR/fresh.log" '^resumed step ' "$FRESH_PID" 60 | sed 's/^/  job: /'
    kill -TERM "$FRESH_PID"
else
    fail "checkpoint ended with $STATUS; 3 (no custom storage) or 0 was expected"
fi

say ""
say "2. the same process under the handler, and a notice"
cat >"$DIR/run.toml" <<TOML
[job]
name = "gpu-run"
restore_command = ["$TESTKIT", "target", "--gpus", "1", "--bytes", "256MiB", "--fill", "mixed", "--seed", "7", "--step-ms", "100", "--suspended"]
state_dir = "$DIR/state"
[store]
url = "s3://ckpt/run"
endpoint = "$ENDPOINT"
[preempt]
notice = "20s"
TOML
start run.log "$CKPTSTREAM" run --config "$DIR/run.toml" --progress none -- "$TESTKIT" target --gpus 1 --bytes 256MiB --fill mixed --seed 7 --step-ms 100
RUN_PID=$STARTED
wait_for_line "$DIR/run.log" '^step 20 ' "$RUN_PID" 60 | sed 's/^/  job: /'
"$CKPTSTREAM" status --config "$DIR/run.toml" | sed 's/^/  /'
RUN_STATUS=0
kill -TERM "$RUN_PID"
wait "$RUN_PID" || RUN_STATUS=$?
grep -v '^step ' "$DIR/run.log" | sed 's/^/  /'
say "  exit $RUN_STATUS"
# Refused before anything was touched, the job has the signal and ends of it; else it was saved and ended.
case "$STATUS-$RUN_STATUS" in
3-143 | 0-75) ;;
*) fail "run ended with $RUN_STATUS" ;;
esac

say ""
say "3. the whole pipeline, $BYTES of real GPU memory into the test S3 server and back, every byte compared"
"$CKPTSTREAM" bench --data bf16 --size "$BYTES" --gpus 1 --runs 1 --to store --job gpu-check --store s3://ckpt/bench --endpoint "$ENDPOINT" --progress plain 2>&1 | sed 's/^/  /'

say ""
say "gpu-check: OK in $SECONDS s"
