#!/usr/bin/env bash
# `ckptstream run` as process 1 of a pid namespace, as in a container: SIGTERM to it saves the job, orphans are collected, the next start goes on. Then a shell as process 1, which swallows SIGTERM,
# and `ckptstream notify` beside it, as a preStop hook brings it.
#
# Needs root, for `unshare --pid`. BIN_DIR names a folder with the programs; without it they are built, which needs a Rust toolchain. GPUs and S3 server are emulated.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

ORPHANS=5
STEPS=150
STEP_MS=100
# Until something that must come has come, in seconds.
PATIENCE=60

[ "$(id -u)" -eq 0 ] || fail "a pid namespace needs root"
need_programs
CKPTSTREAM=$BIN_DIR/ckptstream
TESTKIT=$BIN_DIR/testkit
export EMULATED_CUDA_LIB=$BIN_DIR/libemulated_cuda.so
EMULATED_DRIVER_DIR=$(emulated_driver_dir)
need util-linux unshare
need procps pgrep

DIR=$(mktemp -d)
clean_up() {
    local status=$?
    trap - EXIT INT TERM
    # With process 1 its namespace ends.
    [ -z "${INIT:-}" ] || kill -KILL "$INIT" 2>/dev/null || true
    end_started
    if [ "$status" -ne 0 ]; then
        for log in "$DIR"/*.log; do
            [ -s "$log" ] && printf -- '--- the end of %s\n%s\n' "${log##*/}" "$(tail -n 20 "$log")" >&2
        done
        say "pid1-test: FAILED, see above"
    fi
    rm -rf "$DIR"
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

use_test_store
export EMULATED_CUDA="memory=64MiB;node=$$" LD_LIBRARY_PATH=$EMULATED_DRIVER_DIR
start s3.log "$TESTKIT" s3 --addr 127.0.0.1:0 --bucket pid1
ENDPOINT=$(wait_for_line "$DIR/s3.log" '^listening ' "$STARTED" 10)

# Leaves processes behind whose parents are gone, and becomes the job.
cat >"$DIR/job.sh" <<SH
for i in \$(seq $ORPHANS); do
    (sleep 1000 &)
done
exec "$TESTKIT" target --bytes 4MiB --fill mixed --seed 7 --steps $STEPS --step-ms $STEP_MS "\$@"
SH
configure() {
    export CKPTSTREAM_CONFIG=$DIR/$1.toml
    cat >"$CKPTSTREAM_CONFIG" <<TOML
[job]
name = "$1"
state_dir = "$DIR/state"
restore_command = ["sh", "$DIR/job.sh", "--suspended"]
[store]
url = "s3://pid1/images"
endpoint = "${ENDPOINT#listening }"
[pipeline]
memory_budget = "64MiB"
threads = 1
TOML
}

# contain LOG COMMAND...: the command as process 1 of a namespace of its own; its pid here is $INIT, and that of who waits for it $STARTED.
contain() {
    start "$1" unshare --pid --fork --mount-proc "${@:2}"
    LOG=$DIR/$1
    local tries=$((PATIENCE * 50))
    while ! INIT=$(pgrep -P "$STARTED"); do
        [ $((tries -= 1)) -gt 0 ] || fail "no process 1"
        sleep 0.02
    done
}

# inside COMMAND...: in the namespace of $INIT, as `kubectl exec` or a preStop hook.
inside() {
    nsenter --target "$INIT" --pid --mount "$@"
}

must_end_with() {
    local status=0
    wait "$STARTED" || status=$?
    [ "$status" -eq "$1" ] || fail "${LOG##*/}: ended with $status, not $1"
    INIT=
    say "    it ended with $status"
}

# children: those of process 1 that are `sleep`, or were it and nobody has collected them.
children() {
    pgrep -P "$INIT" '^sleep$' || true
}

# Ends the orphans that the job has left to process 1, all of which it must collect.
must_collect_orphans() {
    local tries=$((PATIENCE * 10)) orphans
    while mapfile -t orphans < <(children) && [ "${#orphans[@]}" -lt "$ORPHANS" ]; do
        [ $((tries -= 1)) -gt 0 ] || fail "${LOG##*/}: ${#orphans[@]} of $ORPHANS orphans came to process 1"
        sleep 0.1
    done
    kill -TERM "${orphans[@]}"
    while mapfile -t orphans < <(children) && [ "${#orphans[@]}" -gt 0 ]; do
        [ $((tries -= 1)) -gt 0 ] || fail "${LOG##*/}: ${#orphans[@]} zombies"
        sleep 0.1
    done
    say "    $ORPHANS orphans came to process 1, ended and were collected: no zombie"
}

digests() {
    grep -hE '^(step [0-9]+|done) digest [0-9a-f]{32}$' "$@" | sort -u
}

must_equal_reference() {
    digests "$DIR/reference.log" >"$DIR/expected"
    digests "$@" >"$DIR/seen"
    diff "$DIR/expected" "$DIR/seen" >"$DIR/difference.log" || fail "digests differ from those of the uninterrupted run"
    say "    $(wc -l <"$DIR/seen") digests equal the uninterrupted run's"
}

must_be_saved() {
    wait_for_line "$LOG" 'exit 75: start it again' "$STARTED" "$PATIENCE" | sed 's/^/    /'
}

"$TESTKIT" target --bytes 4MiB --fill mixed --seed 7 --steps "$STEPS" >"$DIR/reference.log"

say "1. ckptstream run as process 1"
configure init
contain init-1.log "$CKPTSTREAM" run -- sh "$DIR/job.sh"
must_collect_orphans
wait_for_line "$LOG" '^step 12 ' "$STARTED" "$PATIENCE" >/dev/null
say "    SIGTERM to process 1"
kill -TERM "$INIT"
must_be_saved
must_end_with 75

say "2. The next container goes on; a preStop hook saves it"
contain init-2.log "$CKPTSTREAM" run -- sh "$DIR/job.sh"
wait_for_line "$LOG" '^resumed step ' "$STARTED" "$PATIENCE" | sed 's/^/    /'
must_collect_orphans
wait_for_line "$LOG" '^step 30 ' "$STARTED" "$PATIENCE" >/dev/null
say "    ckptstream notify --left 30s in it"
inside "$CKPTSTREAM" notify --left 30s | sed 's/^/    /'
must_be_saved
must_end_with 75

say "3. The third one finishes"
contain init-3.log "$CKPTSTREAM" run -- sh "$DIR/job.sh"
must_end_with 0
must_equal_reference "$DIR"/init-*.log

say "4. A shell as process 1 swallows SIGTERM, and the hook saves the job all the same"
configure shell
# shellcheck disable=SC2016 # the variables are the inner shell's
contain shell-1.log sh -c '"$0" run -- sh "$1" & wait "$!"' "$CKPTSTREAM" "$DIR/job.sh"
wait_for_line "$LOG" '^step 5 ' "$STARTED" "$PATIENCE" >/dev/null
kill -TERM "$INIT"
sleep 1
kill -0 "$INIT" || fail "the shell ended"
if grep -q 'notice from' "$LOG"; then
    fail "the shell passed SIGTERM on"
fi
say "    SIGTERM to process 1: nothing happens"
inside "$CKPTSTREAM" notify --left 30s | sed 's/^/    /'
must_be_saved
must_end_with 75

say "5. A shell with a trap passes it on"
# shellcheck disable=SC2016
contain shell-2.log bash -c '"$0" run -- sh "$1" & run=$!; trap "heard=yes; kill -TERM $run" TERM; while :; do heard=; wait "$run"; code=$?; [ -n "$heard" ] || exit "$code"; done' "$CKPTSTREAM" "$DIR/job.sh"
wait_for_line "$LOG" '^resumed step ' "$STARTED" "$PATIENCE" | sed 's/^/    /'
wait_for_line "$LOG" '^step 25 ' "$STARTED" "$PATIENCE" >/dev/null
kill -TERM "$INIT"
must_be_saved
must_end_with 75
contain shell-3.log "$CKPTSTREAM" run -- sh "$DIR/job.sh"
must_end_with 0
must_equal_reference "$DIR"/shell-*.log

say "pid1-test: OK in $SECONDS s"
