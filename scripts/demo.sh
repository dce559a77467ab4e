#!/usr/bin/env bash
# The main job, start to end, on this machine alone: an emulated training job on two emulated GPUs is saved to S3, killed, and put back into
# fresh processes, on the same GPUs and then on others, where it must go on exactly as if nothing had happened.
# Needs a Rust toolchain; installs what else it misses on Debian and Ubuntu. GPUs and S3 server are emulated: no figure here is one of hardware.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

GPU_COUNT=2
GPU_MIB=512
STEP_COUNT=12
SAVE_AFTER_STEP=4
# How long the demo may take once everything is built, in seconds.
SECONDS_MAX=60
# Emulated nodes are told apart by number. The job's GPUs are those of the first; the second has others.
NODE=$$
OTHER_NODE=$(($$ + 10000000))

need_build_tools
say "building (a first build takes minutes; the demo itself less than $SECONDS_MAX s)"
build_all
CKPTSTREAM=$(binary ckptstream)
TESTKIT=$(binary testkit)
DIR=$(mktemp -d)

clean_up() {
    local status=$?
    trap - EXIT INT TERM
    end_started
    if [ "$status" -ne 0 ]; then
        for log in "$DIR"/*; do
            [ -s "$log" ] && printf -- '--- the end of %s\n%s\n' "${log##*/}" "$(tail -n 15 "$log")" >&2
        done
        say "demo: FAILED, see above"
    fi
    rm -rf "$DIR"
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

use_test_store

# on_node NODE COMMAND...: runs the command (by exec, if called in the background) as if on that emulated node.
on_node() {
    local node=$1
    shift
    EMULATED_CUDA="gpus=$GPU_COUNT;memory=1GiB;node=$node" exec scripts/with-emulated-driver.sh "$@"
}

# start_job LOG FLAG...: the training job on the first node.
start_job() {
    local log=$1
    shift
    start "$log" on_node "$NODE" "$TESTKIT" target --gpus "$GPU_COUNT" --bytes "${GPU_MIB}MiB" --fill mixed --seed 7 \
        --steps "$STEP_COUNT" "$@"
}

# shown COMMAND...: prints the command as a user would type it, then its output, indented.
shown() {
    say "  \$ ${*/#$CKPTSTREAM/ckptstream}"
    "$@" 2>&1 | sed 's/^/    /'
}

shown_on_node() {
    local node=$1
    shift
    say "  \$ ${*/#$CKPTSTREAM/ckptstream}"
    (on_node "$node" "$@") 2>&1 | sed 's/^/    /'
}

# The clock in milliseconds, and the seconds since such a moment.
now_ms() {
    local now=$EPOCHREALTIME
    printf '%s\n' "$((${now/[.,]/} / 1000))"
}
seconds_since() {
    local ms=$(($(now_ms) - $1))
    printf '%d.%d\n' $((ms / 1000)) $((ms % 1000 / 100))
}

# digests LOG...: what the job printed about its memory, each line once.
digests() {
    local log
    for log in "$@"; do
        grep -E '^(step [0-9]+|done) digest ' "$DIR/$log" || true
    done | sort -u
}

# must_equal_reference LOG...: together they printed what the uninterrupted run did, no digest more, none less, none else.
must_equal_reference() {
    if ! diff <(digests reference.log) <(digests "$@") >"$DIR/difference"; then
        fail "digests differ from those of the uninterrupted run"
    fi
}

DEMO_STARTED_MS=$(now_ms)

say ""
say "1. The uninterrupted run: $GPU_COUNT GPUs x $GPU_MIB MiB, $STEP_COUNT steps, a digest of all GPU memory after each."
SINCE_MS=$(now_ms)
start_job reference.log
wait "$STARTED" || fail "the uninterrupted run failed"
DIGEST_COUNT=$(digests reference.log | wc -l)
[ "$DIGEST_COUNT" -eq $((STEP_COUNT + 2)) ] || fail "$DIGEST_COUNT digests, not one for each of steps 0 to $STEP_COUNT and the end"
say "  $DIGEST_COUNT digests in $(seconds_since "$SINCE_MS") s; the last line: $(tail -n 1 "$DIR/reference.log")"

say ""
say "2. An S3 server in memory, and the same job again, slowed down a little."
start s3.log "$TESTKIT" s3 --addr 127.0.0.1:0 --bucket ckpt
S3_PID=$STARTED
ENDPOINT=$(wait_for_line "$DIR/s3.log" '^listening ' "$S3_PID" 10)
ENDPOINT=${ENDPOINT#listening }
STORE=(--job demo --store s3://ckpt/demo --endpoint "$ENDPOINT")
start_job job.log --step-ms 200
JOB_PID=$STARTED
say "  job: pid $JOB_PID; store: s3://ckpt/demo at $ENDPOINT"
wait_for_line "$DIR/job.log" "^step $SAVE_AFTER_STEP " "$JOB_PID" 30 | sed 's/^/  job: /'

say ""
say "3. The node is about to go: save the job."
SINCE_MS=$(now_ms)
shown_on_node "$NODE" "$CKPTSTREAM" checkpoint --pid "$JOB_PID" "${STORE[@]}" --progress plain
OUT_SECONDS=$(seconds_since "$SINCE_MS")
say "  saved in $OUT_SECONDS s; the job is suspended and its GPUs are free. In the store now:"
shown "$CKPTSTREAM" list "${STORE[@]}"
shown "$CKPTSTREAM" inspect --image latest "${STORE[@]}"

say ""
say "4. The node is gone: kill -9 $JOB_PID."
kill -KILL "$JOB_PID"
{ wait "$JOB_PID"; } 2>/dev/null || true
say "  the job's last words: $(tail -n 1 "$DIR/job.log")"

# restored LOG NODE_OF_RESTORE FLAG...: a fresh, suspended job, restored on that node and run to its end.
restored() {
    local log=$1 node=$2
    shift 2
    start_job "$log" --suspended "$@"
    local pid=$STARTED
    wait_for_line "$DIR/$log" '^suspended pid ' "$pid" 30 | sed 's/^/  fresh process: /'
    SINCE_MS=$(now_ms)
    shown_on_node "$node" "$CKPTSTREAM" restore --pid "$pid" "${STORE[@]}" --into-fresh --image latest --progress plain
    BACK_SECONDS=$(seconds_since "$SINCE_MS")
    say "  restored in $BACK_SECONDS s"
    wait_for_line "$DIR/$log" '^resumed step ' "$pid" 30 | sed 's/^/  job: /'
    wait "$pid" || fail "the restored job failed"
    say "  job: $(tail -n 1 "$DIR/$log")"
    must_equal_reference job.log "$log"
    say "  every digest before and after the save equals the uninterrupted run's"
}

say ""
say "5. A fresh process that has computed nothing takes the image and goes on."
restored restored.log "$NODE" --step-ms 200
FIRST_BACK_SECONDS=$BACK_SECONDS

say ""
say "6. The same again on a node with other GPUs: each stored GPU is mapped to one that is there."
restored moved.log "$OTHER_NODE"

say ""
DEMO_SECONDS=$(seconds_since "$DEMO_STARTED_MS")
say "demo: OK in $DEMO_SECONDS s: $((GPU_COUNT * GPU_MIB)) MiB on $GPU_COUNT emulated GPUs saved in $OUT_SECONDS s," \
    "restored in $FIRST_BACK_SECONDS s and, on other GPUs, in $BACK_SECONDS s; $DIGEST_COUNT of $DIGEST_COUNT digests equal, twice"
# No failure: a busy machine makes it slow, and says nothing about ckptstream.
if [ "${DEMO_SECONDS%.*}" -ge "$SECONDS_MAX" ]; then
    say "demo: WARNING: it took $DEMO_SECONDS s, and less than $SECONDS_MAX s is the limit; is this machine busy?" >&2
fi
