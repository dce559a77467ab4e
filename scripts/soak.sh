#!/usr/bin/env bash
# Saves a job, kills it and brings it back, again and again, while about one request in twenty to the store goes wrong; every digest that the job prints must be that of the same job
# left alone, and ckptstream's memory must not grow.
#
# usage: soak.sh [SECONDS [SEED]]     how long (3600), and what all choices follow from (random; printed): the first job from SEED, the next one from SEED + 1, and so on
# A round is: the job computes a little while; it is saved (one time in three with `--then resume`, and has to go on); it gets kill -9; a fresh process takes the image. After ten rounds the
# job is held against a reference run, and a new one starts on an empty store with other faults. What a failure leaves is kept, and where is said.
# BIN_DIR names a folder with the programs; without it they are built, which needs a Rust toolchain. Needs python3; installs it on Debian and Ubuntu.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

DURATION=${1:-3600}
SEED=${2:-$RANDOM}
ROUNDS_OF_A_JOB=10
# Two GPUs, several parts each; small enough that a round takes a few seconds.
JOB_FLAGS=(--gpus 2 --bytes 24MiB --fill mixed)
STEP_MS=50
# Until something that must come has come, in seconds: longer than ckptstream tries.
PATIENCE=120

need_programs
need python3 python3
CKPTSTREAM=$BIN_DIR/ckptstream
TESTKIT=$BIN_DIR/testkit
export EMULATED_CUDA_LIB=$BIN_DIR/libemulated_cuda.so
use_test_store

SOAK_DIR=$(mktemp -d)
RESULTS=$SOAK_DIR/results.jsonl
JOB_PROCESS=
clean_up() {
    local status=$?
    trap - EXIT INT TERM
    if [ -n "$JOB_PROCESS" ]; then
        kill -TERM "$JOB_PROCESS" 2>/dev/null || true
        wait "$JOB_PROCESS" 2>/dev/null || true
    fi
    if [ "$status" -eq 0 ]; then
        rm -rf "$SOAK_DIR"
    else
        say "soak: kept $SOAK_DIR"
    fi
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

cat >"$SOAK_DIR/config.toml" <<'TOML'
[pipeline]
chunk_size = "1MiB"
memory_budget = "64MiB"
threads = 2
[store]
part_size = "5MiB"
connect_timeout = "2s"
request_timeout = "5s"
stall_timeout = "5s"
retry_timeout = "60s"
TOML

# Runs a command, and appends one line to the results: exit status, wall seconds, greatest resident memory in KiB as the kernel counts it (the target's GPU memory, which the emulated
# driver maps, is in it), and what `--json` says.
cat >"$SOAK_DIR/measure.py" <<'PYTHON'
import json, os, subprocess, sys, time

results, number, out, *command = sys.argv[1:]
started = time.monotonic()
with open(out, "w") as stdout:
    child = subprocess.Popen(command, stdout=stdout)
_, status, usage = os.wait4(child.pid, 0)
seconds = time.monotonic() - started
code = os.waitstatus_to_exitcode(status)
try:
    report = json.load(open(out))
except ValueError:
    report = {}
name = command[1] + " --then resume" * ("resume" in command)
line = {"round": int(number), "command": name, "code": code, "seconds": round(seconds, 3), "rss_kib": usage.ru_maxrss,
        "retries": report.get("retries", 0), "generation": report.get("generation"), "state": [target["state"] for target in report.get("targets", [])]}
with open(results, "a") as file:
    file.write(json.dumps(line) + "\n")
sys.exit(code if code >= 0 else 128 - code)
PYTHON

# rules: faults for about 5 % of all requests. Each kind comes with every k-th request, the ks are primes, so that the kinds meet one another, and all requests, in ever other ways.
rules() {
    local primes=(113 127 131 137 139 149 151 157 163 167 173 179) k=() index
    for index in 0 1 2 3; do
        # No prime twice: each has three of its own to choose from.
        k+=("${primes[index * 3 + RANDOM % 3]}")
    done
    cat <<JSON
[
  {"op": "*", "every": ${k[0]}, "action": {"status": 500, "code": "InternalError"}},
  {"op": "*", "every": ${k[1]}, "action": {"status": 503, "code": "SlowDown"}},
  {"op": "*", "every": ${k[2]}, "action": {"drop": true}},
  {"op": "*", "every": ${k[3]}, "action": {"delay_before_ms": $((100 + RANDOM % 900))}},
  {"op": ["PutObject", "UploadPart", "CreateMultipartUpload", "CompleteMultipartUpload"], "every": 23, "action": {"apply": true, "drop": true}},
  {"op": "CompleteMultipartUpload", "every": 5, "action": {"body": "<Error><Code>InternalError</Code><Message>soak</Message></Error>"}},
  {"op": "UploadPart", "every": 13, "action": {"wire": "reset-after", "bytes": $((RANDOM * 16))}},
  {"op": "GetObject", "every": 71, "action": {"wire": "cut-after", "bytes": $((RANDOM % 300))}}
]
JSON
}

on_node() {
    EMULATED_CUDA="gpus=2;memory=64MiB;node=$NODE" exec scripts/with-emulated-driver.sh "$@"
}

# start_target FLAG...: the job in a process of its own, which is waited for: its output is $DIR/$LOG, its pid $TARGET.
start_target() {
    LOG=target-$ROUND-$((TARGETS += 1)).log
    start "$LOG" on_node "$TESTKIT" target "${JOB_FLAGS[@]}" --seed "$JOB_SEED" --step-ms "$STEP_MS" "$@"
    TARGET=$STARTED
    wait_for_line "$DIR/$LOG" "^(ready|suspended) pid " "$TARGET" "$PATIENCE" >/dev/null
}

# kill_target: the target is the last process started. Its pid may soon be another's.
kill_target() {
    kill -KILL "$TARGET"
    { wait "$TARGET"; } 2>/dev/null || true
    unset 'STARTED_PIDS[-1]'
}

# must_go_on: the target takes two steps more than it has, by itself.
must_go_on() {
    local tries=$((PATIENCE * 50)) goal
    goal=$(($(grep -c '^step ' "$DIR/$LOG" || true) + 2))
    while [ "$(grep -c '^step ' "$DIR/$LOG" || true)" -lt "$goal" ]; do
        kill -0 "$TARGET" 2>/dev/null || fail "round $ROUND: the target ended"
        [ $((tries -= 1)) -gt 0 ] || fail "round $ROUND: the target does not go on"
        sleep 0.02
    done
}

compute_a_while() {
    local ms=$((RANDOM % 1000))
    sleep "$((ms / 1000)).$(printf '%03d' $((ms % 1000)))"
}

# ckptstream_does COMMAND FLAG...: runs it on the target; exit status to $CODE.
ckptstream_does() {
    CODE=0
    (on_node python3 "$SOAK_DIR/measure.py" "$RESULTS" "$ROUND" "$DIR/report.json" "$CKPTSTREAM" "$1" --pid "$TARGET" "${STORE[@]}" --config "$SOAK_DIR/config.toml" \
        --json --progress none "${@:2}") 2>"$DIR/ckptstream-$ROUND-$1.err" || CODE=$?
    cp "$DIR/report.json" "$DIR/ckptstream-$ROUND-$1.json"
}

# save FLAG...: saves the target. A failure before the point of no return leaves it running, so that it can be saved again.
save() {
    local tries
    for tries in 1 2 3; do
        ckptstream_does checkpoint "$@"
        [ "$CODE" -eq 10 ] || break
        must_go_on
    done
    [ "$CODE" -eq 0 ] || fail "round $ROUND: checkpoint ended with $CODE (try $tries)"
}

# bring_back: a fresh process takes the newest image, which must be the one just saved.
bring_back() {
    local saved tries
    saved=$(member generation)
    for tries in 1 2 3; do
        start_target --suspended
        ckptstream_does restore --into-fresh --image latest
        [ "$CODE" -eq 21 ] || break
        kill_target
    done
    [ "$CODE" -eq 0 ] || fail "round $ROUND: restore ended with $CODE (try $tries)"
    [ "$(member generation)" = "$saved" ] || fail "round $ROUND: image $saved was saved, and $(member generation) restored"
    wait_for_line "$DIR/$LOG" '^resumed step ' "$TARGET" "$PATIENCE" >/dev/null
    must_go_on
}

# member NAME: of the last report.
member() {
    python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$DIR/report.json" "$1"
}

# digests LOG...: what targets printed about their memory, in the order of the steps, each line once. The last line of one that was killed may be cut off.
digests() {
    cat "$@" | grep -E '^step [0-9]+ digest [0-9a-f]{32}$' | sort -u -k 2,2n -k 4
}

# one_job: an empty store with faults of its own, a job from its first step on, and some rounds. Runs as a process of its own, so that a failure ends this job only.
one_job() {
    trap end_started EXIT
    trap 'exit 143' TERM
    RANDOM=$JOB_SEED
    rules >"$DIR/rules.json"
    mkdir "$DIR/store"
    start s3.log "$TESTKIT" s3 --addr 127.0.0.1:0 --bucket soak --root "$DIR/store" --rules "$DIR/rules.json" --log "$DIR/requests.jsonl"
    local endpoint
    endpoint=$(wait_for_line "$DIR/s3.log" '^listening ' "$STARTED" 10)
    STORE=(--job "soak-$JOB" --store s3://soak/images --endpoint "${endpoint#listening }")

    local rounds=0 last
    start_target
    while [ "$rounds" -lt "$ROUNDS_OF_A_JOB" ] && [ "$EPOCHSECONDS" -lt "$END" ]; do
        compute_a_while
        if [ $((RANDOM % 3)) -eq 0 ]; then
            save --then resume
            must_go_on
            compute_a_while
        else
            save
        fi
        kill_target
        bring_back
        printf '%s\n' "$ROUND" >"$SOAK_DIR/round"
        ROUND=$((ROUND + 1))
        rounds=$((rounds + 1))
    done
    kill_target

    digests "$DIR"/target-*.log >"$DIR/seen"
    last=$(tail -n 1 "$DIR/seen" | cut -d ' ' -f 2)
    # Without an end, as the job: how many steps there are to be stands in its memory.
    start reference.log on_node "$TESTKIT" target "${JOB_FLAGS[@]}" --seed "$JOB_SEED"
    wait_for_line "$DIR/reference.log" "^step $last digest " "$STARTED" "$PATIENCE" >/dev/null
    digests "$DIR/reference.log" | sed "$((last + 2)),\$d" >"$DIR/expected"
    diff "$DIR/expected" "$DIR/seen" >"$DIR/difference" || fail "job $JOB: digests differ from those of the job left alone: $DIR/difference"
}

END=$((EPOCHSECONDS + DURATION))
say "soak: $DURATION s, seed $SEED; about one request in twenty goes wrong"
FAILURES=0
JOB=0
printf '0\n' >"$SOAK_DIR/round"
while [ "$EPOCHSECONDS" -lt "$END" ]; do
    JOB=$((JOB + 1))
    JOB_SEED=$((SEED + JOB - 1))
    DIR=$SOAK_DIR/job-$JOB
    mkdir "$DIR"
    NODE=$(($$ * 1000 + JOB))
    ROUND=$(($(<"$SOAK_DIR/round") + 1))
    TARGETS=0
    # Not in a condition, where the shell would go on after a command that fails.
    (one_job) &
    JOB_PROCESS=$!
    STATUS=0
    wait "$JOB_PROCESS" || STATUS=$?
    JOB_PROCESS=
    cat "$DIR/requests.jsonl" >>"$SOAK_DIR/requests.jsonl"
    rm -rf "$DIR/store"
    if [ "$STATUS" -ne 0 ]; then
        FAILURES=$((FAILURES + 1))
        say "job $JOB FAILED: see $DIR; again: soak.sh 60 $JOB_SEED"
    else
        rm -rf "$DIR"
        say "job $JOB: OK, $(<"$SOAK_DIR/round") rounds in $((EPOCHSECONDS - END + DURATION)) s"
    fi
done

say ""
python3 - "$RESULTS" "$SOAK_DIR/requests.jsonl" "$FAILURES" <<'PYTHON' || fail "seed $SEED: FAILED"
"""The tally: what ckptstream did, what the store did to it, and whether memory grew."""
import collections, json, statistics, sys

# In the order of the rules.
KINDS = ["500", "503 SlowDown", "dropped unread", "delay", "done, then dropped", "200 with an error", "reset", "cut body"]
GROWTH_MAX = 0.05
lines = lambda path: [json.loads(line) for line in open(path)]
results, requests, failures = lines(sys.argv[1]), lines(sys.argv[2]), int(sys.argv[3])

faults = collections.Counter(KINDS[line["fault"]] for line in requests if "fault" in line)
print(f"requests: {len(requests)}, with a fault {faults.total()} ({faults.total() / max(len(requests), 1):.1%}): "
      + ", ".join(f"{kind} {count}" for kind, count in faults.most_common()))
for command in sorted({run["command"] for run in results}):
    runs = [run for run in results if run["command"] == command]
    codes = collections.Counter(run["code"] for run in runs)
    seconds = [run["seconds"] for run in runs]
    memory = [run["rss_kib"] / 1024 for run in runs]
    quarter = max(len(runs) // 4, 1)
    first, last = memory[:quarter], memory[-quarter:]
    growth = statistics.median(last) / statistics.median(first) - 1
    grew = growth > GROWTH_MAX
    failures += grew
    print(f"{command}: {len(runs)} runs; exit codes " + ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
          + f"; retries {sum(run['retries'] for run in runs)}; seconds median {statistics.median(seconds):.2f}, most {max(seconds):.2f}")
    print(f"    most memory {max(memory):.1f} MiB; first quarter median {statistics.median(first):.1f}, most {max(first):.1f}; "
          f"last quarter median {statistics.median(last):.1f}, most {max(last):.1f}: {growth:+.1%}, {'GREW' if grew else 'flat'}")
print(f"failures: {failures}")
sys.exit(failures > 0)
PYTHON
say "soak: OK, $(<"$SOAK_DIR/round") rounds in $SECONDS s, seed $SEED: every digest is that of the job left alone"
