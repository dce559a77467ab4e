#!/usr/bin/env bash
# The main job, start to end, on this machine alone: an emulated training job on two emulated GPUs runs under `ckptstream run`, is told that its node goes away, is saved to S3 and ended, and started again on a node with other
# GPUs, where it must go on exactly as if nothing had happened.
# Needs a Rust toolchain; installs what else it misses on Debian and Ubuntu. GPUs and S3 server are emulated: no figure here is one of hardware.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

GPU_COUNT=2
GPU_MIB=512
STEP_COUNT=12
SAVE_AFTER_STEP=4
# Seconds between the signal and the end of the node.
NOTICE=20
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
say "2. An S3 server in memory, and one TOML file for everything. The same job under the handler:"
start s3.log "$TESTKIT" s3 --addr 127.0.0.1:0 --bucket ckpt
S3_PID=$STARTED
ENDPOINT=$(wait_for_line "$DIR/s3.log" '^listening ' "$S3_PID" 10)
ENDPOINT=${ENDPOINT#listening }

# The job's command line, and as a list of strings.
JOB=("$TESTKIT" target --gpus "$GPU_COUNT" --bytes "${GPU_MIB}MiB" --fill mixed --seed 7 --steps "$STEP_COUNT" --step-ms 200)
JOB_LIST=$(printf '"%s", ' "${JOB[@]}")
# configuration NODE: every node has a file; all of them say the same but for where the node keeps what is under way.
configuration() {
    cat >"$DIR/$1.toml" <<TOML
[job]
name = "demo"
restore_command = [${JOB_LIST}"--suspended"]
state_dir = "$DIR/$1"

[store]
url = "s3://ckpt/demo"
endpoint = "$ENDPOINT"

[preempt]
notice = "${NOTICE}s"
TOML
}
configuration a
configuration b
sed 's/^/    /' "$DIR/a.toml"
CK_LIST=(--config "$DIR/a.toml")

# run_job LOG NODE FILE: the job under the handler, on that node.
run_job() {
    start "$1" on_node "$2" "$CKPTSTREAM" run --config "$DIR/$3.toml" --progress plain -- "${JOB[@]}"
    RUN_PID=$STARTED
    say "  \$ ckptstream run --config $3.toml -- ${JOB[*]/#$TESTKIT/testkit}"
}
run_job job.log "$NODE" a
wait_for_line "$DIR/job.log" "^step $SAVE_AFTER_STEP " "$RUN_PID" 60 | sed 's/^/    /'
shown "$CKPTSTREAM" status "${CK_LIST[@]}"

say ""
say "3. The node goes away in $NOTICE s: SIGTERM to ckptstream."
SINCE_MS=$(now_ms)
kill -TERM "$RUN_PID"
CODE=0
wait "$RUN_PID" || CODE=$?
OUT_SECONDS=$(seconds_since "$SINCE_MS")
sed -n '/notice from signal/,$p' "$DIR/job.log" | sed 's/^/    /'
[ "$CODE" -eq 75 ] || fail "run ended with $CODE, and not with 75"
say "  saved and ended in $OUT_SECONDS s; exit status $CODE tells the scheduler to start it again. In the store now:"
shown "$CKPTSTREAM" list "${CK_LIST[@]}"
shown "$CKPTSTREAM" inspect --image latest "${CK_LIST[@]}"

say ""
say "4. The scheduler starts the very same command again, on a node with other GPUs."
SINCE_MS=$(now_ms)
run_job again.log "$OTHER_NODE" b
wait_for_line "$DIR/again.log" '^resumed step ' "$RUN_PID" 60 >/dev/null
BACK_SECONDS=$(seconds_since "$SINCE_MS")
wait "$RUN_PID" || fail "the job failed on the second node"
grep -v '^step ' "$DIR/again.log" | sed 's/^/    /'
must_equal_reference job.log again.log
say "  running again after $BACK_SECONDS s; every digest before and after equals the uninterrupted run's"

say ""
DEMO_SECONDS=$(seconds_since "$DEMO_STARTED_MS")
say "demo: OK in $DEMO_SECONDS s: $((GPU_COUNT * GPU_MIB)) MiB on $GPU_COUNT emulated GPUs saved $OUT_SECONDS s after the signal, with $NOTICE s notice," \
    "running on other GPUs $BACK_SECONDS s after its next start; $DIGEST_COUNT of $DIGEST_COUNT digests equal"
# No failure: a busy machine makes it slow, and says nothing about ckptstream.
if [ "${DEMO_SECONDS%.*}" -ge "$SECONDS_MAX" ]; then
    say "demo: WARNING: it took $DEMO_SECONDS s, and less than $SECONDS_MAX s is the limit; is this machine busy?" >&2
fi
