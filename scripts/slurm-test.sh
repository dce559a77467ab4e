#!/usr/bin/env bash
# Slurm itself, one node of it, sends the notices: a time limit, `scontrol requeue` and pre-emption, to jobs that run as docs/deploy says. Each must be saved, requeued and go on, and the digests of
# its lives together must be those of an uninterrupted run. A job that does not ignore Slurm's signals must be ended by them, but with PROCTRACK=proctrack/cgroup, because docs/deploy says so.
#
# The daemons run on 127.0.0.1 with all they write in a temporary directory, and end with the script. Takes 4 minutes, most of them Slurm's: time limits are whole minutes.
# Needs root. Installs Slurm on Debian and Ubuntu without starting its services. BIN_DIR names a folder with the programs; without it they are built, which needs a Rust toolchain.
# GPUs and S3 server are emulated.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# How Slurm finds the processes of a step, and so who is signalled. proctrack/cgroup, which most sites have, needs cgroups that this machine lets it make.
PROCTRACK=${PROCTRACK:-proctrack/linuxproc}
# As many as Slurm believes in. What a job asks for decides who has to go for the job of the partition `high`: all four in `low`, which have 4 each.
CPUS=32
HIGH_WANTS=24
# KillWait, GraceTime and preempt.notice, in seconds.
NOTICE=20
STEP_MS=500
# A job with a time limit of 2 minutes has its notice 60 to 90 s after the start (30 s, and up to 30 s early), and must not be done by then.
LONG_STEPS=230
SHORT_STEPS=200
# Until all have ended, in seconds from the first one's start.
PATIENCE=420

[ "$(id -u)" -eq 0 ] || fail "slurmd needs root"
need_programs
TESTKIT=$BIN_DIR/testkit
export EMULATED_CUDA_LIB=$BIN_DIR/libemulated_cuda.so
EMULATED_DRIVER_DIR=$(emulated_driver_dir)

# The packages would start their services.
install_slurm() {
    local policy=/usr/sbin/policy-rc.d status=0
    if [ -e "$policy" ]; then
        apt_install slurmctld slurmd slurm-client munge
        return
    fi
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    (apt_install slurmctld slurmd slurm-client munge) || status=$?
    rm -f "$policy"
    [ "$status" -eq 0 ] || fail "Slurm cannot be installed"
}
for program in slurmctld slurmd sbatch srun munged; do
    command -v "$program" >/dev/null || { install_slurm; break; }
done

DIR=$(mktemp -d)
# Daemons look into it under other names.
chmod 711 "$DIR"
JOBS=()
HOST=$(hostname -s)
clean_up() {
    local status=$?
    trap - EXIT INT TERM
    if [ "${#JOBS[@]}" -gt 0 ]; then
        scancel --full --signal=KILL "${JOBS[@]}" 2>/dev/null || true
        scancel "${JOBS[@]}" 2>/dev/null || true
        for ((tries = 60; tries > 0; tries--)); do
            [ -n "$(squeue --noheader 2>/dev/null)" ] || break
            sleep 0.5
        done
    fi
    end_started
    if [ "$PROCTRACK" = proctrack/cgroup ]; then
        # What slurmd has made, empty now.
        local group
        for group in /sys/fs/cgroup/*/"slurm_$HOST"; do
            [ ! -d "$group" ] || find "$group" -depth -type d -exec rmdir {} \; 2>/dev/null || true
        done
    fi
    if [ "$status" -ne 0 ]; then
        for log in "$DIR"/*.log "$DIR"/*.out "$DIR"/*.lines; do
            [ -s "$log" ] && printf -- '--- the end of %s\n%s\n' "${log##*/}" "$(grep -vE '^step ' "$log" | tail -n 25)" >&2
        done
        say "slurm-test: FAILED, see above"
    fi
    rm -rf "$DIR"
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

use_test_store

say "slurm-test: $(slurmd -V), $(munged --version | head -n 1), $PROCTRACK, $("$BIN_DIR/ckptstream" --version)"

# A cluster of one node. What is not Slurm's default: 5 s instead of 120 until a requeued job may start again, exit code 75 requeues (RequeueExit), a pre-empted job has the signal that it asked for
# (preempt_send_user_signal), and nothing waits longer than it must.
PORT=$((20000 + $$ % 20000))
mkdir -m 755 "$DIR/munge" "$DIR/spool" "$DIR/state" "$DIR/jobs"
(umask 077 && head -c 1024 /dev/urandom >"$DIR/munge/key")
cat >"$DIR/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$HOST(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort=$PORT
SlurmdPort=$((PORT + 1))
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$DIR/munge/socket,cred_expire=5
ProctrackType=$PROCTRACK
TaskPlugin=task/none
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/slurmd.pid
SlurmdSpoolDir=$DIR/spool
StateSaveLocation=$DIR/state
ReturnToService=2
KillWait=$NOTICE
JobRequeue=1
RequeueExit=75
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
SlurmctldParameters=preempt_send_user_signal
NodeName=$HOST NodeAddr=127.0.0.1 CPUs=$CPUS RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=10
PartitionName=high Nodes=ALL State=UP PriorityTier=10
PartitionName=low Nodes=ALL State=UP PriorityTier=1 GraceTime=$NOTICE
CONF
[ "$PROCTRACK" != proctrack/cgroup ] || printf 'CgroupAutomount=no\n' >"$DIR/cgroup.conf"
export SLURM_CONF=$DIR/slurm.conf
start munged.log munged --foreground --key-file="$DIR/munge/key" --socket="$DIR/munge/socket" --pid-file="$DIR/munge/pid" --log-file="$DIR/munge/log" --seed-file="$DIR/munge/seed"
wait_for_line "$DIR/munged.log" 'Created socket' "$STARTED" 10 >/dev/null
start slurmctld.log slurmctld -D
start slurmd.log slurmd -D
SLURMD=$STARTED
start s3.log "$TESTKIT" s3 --addr 127.0.0.1:0 --bucket slurm
ENDPOINT=$(wait_for_line "$DIR/s3.log" '^listening ' "$STARTED" 10)
ENDPOINT=${ENDPOINT#listening }
for ((tries = 100; tries > 0; tries--)); do
    [ "$(sinfo --noheader --format=%T --partition=main 2>/dev/null)" != idle ] || break
    kill -0 "$SLURMD" 2>/dev/null || fail "slurmd ended"
    sleep 0.2
done
[ "$tries" -gt 0 ] || fail "the node does not come up"

# job_flags NAME STEPS: the training job; each with bytes of its own.
job_flags() {
    FLAGS=(target --bytes 4MiB --fill mixed --seed "$(printf '%s' "$1" | cksum | cut -d ' ' -f 1)" --steps "$2")
}

# submit NAME STEPS SCRIPT FLAG...: sbatch of a script of docs/deploy, with a configuration, a store and an emulated node of its own. Output of all lives: NAME.out; job id: $ID.
IGNORING='"env", "--ignore-signal=TERM", "--ignore-signal=USR1", '
submit() {
    local name=$1 steps=$2 script=$3 config=$DIR/jobs/$1.toml
    shift 3
    job_flags "$name" "$steps"
    FLAGS+=(--step-ms "$STEP_MS")
    {
        printf '[job]\nname = "%s"\nstate_dir = "%s"\n' "$name" "$DIR/jobs/state"
        printf 'restore_command = [%s"%s", %s "--suspended"]\n' "$IGNORING" "$TESTKIT" "$(printf '"%s", ' "${FLAGS[@]}")"
        printf '[store]\nurl = "s3://slurm/images"\nendpoint = "%s"\n' "$ENDPOINT"
        printf '[pipeline]\nmemory_budget = "64MiB"\nthreads = 1\n[preempt]\nnotice = "%ss"\n' "$NOTICE"
    } >"$config"
    ID=$(EMULATED_CUDA="memory=64MiB;node=$(($$ * 100 + ${#JOBS[@]}))" LD_LIBRARY_PATH=$EMULATED_DRIVER_DIR PATH=$BIN_DIR:$PATH CKPTSTREAM_CONFIG=$config \
        sbatch --parsable --job-name="$name" --output="$DIR/$name.out" "$@" "$script" "$TESTKIT" "${FLAGS[@]}")
    JOBS+=("$ID")
    say "  job $ID: $name: sbatch $* ${script##*/}"
}

# state ID: of a job, as scontrol tells it, and how it ended.
state() {
    scontrol --oneliner show job "$1" | sed -E 's/.* JobState=([A-Z_]+) .* Restarts=([0-9]+) .* ExitCode=([0-9:]+) .*/\1 restarts \2 exit \3/'
}

until_line() {
    local tries=$(($3 * 5))
    while ! grep -qE -- "$2" "$DIR/$1.out" 2>/dev/null; do
        [ $((tries -= 1)) -gt 0 ] || fail "no line like '$2' from $1 in $3 s"
        sleep 0.2
    done
}

digests() {
    grep -hE '^(step [0-9]+|done) digest [0-9a-f]{32}$' "$@" | sort -u
}

# What slurm.sbatch is where the site has RequeueExit=75: no shell stays.
cat >"$DIR/exec.sbatch" <<'SBATCH'
#!/bin/bash
#SBATCH --requeue --open-mode=append
exec ckptstream run -- env --ignore-signal=TERM --ignore-signal=USR1 "$@"
SBATCH
sed '/^#SBATCH --signal/d' docs/deploy/slurm-step.sbatch >"$DIR/term-step.sbatch"
# A job as it is, without protection.
sed 's/env --ignore-signal=TERM --ignore-signal=USR1 //' docs/deploy/slurm-step.sbatch >"$DIR/bare-step.sbatch"
sed 's/env --ignore-signal=TERM --ignore-signal=USR1 //' docs/deploy/slurm.sbatch >"$DIR/bare-batch.sbatch"

say ""
say "Jobs, all at once:"
SINCE=$SECONDS
SAVED=()
submit limit-batch "$LONG_STEPS" docs/deploy/slurm.sbatch --time=2 --signal=B:USR1@30
SAVED+=(limit-batch)
submit limit-exec "$LONG_STEPS" "$DIR/exec.sbatch" --time=2 --signal=B:USR1@30
SAVED+=(limit-exec)
submit limit-step "$LONG_STEPS" docs/deploy/slurm-step.sbatch --time=2 --signal=USR1@30
SAVED+=(limit-step)
submit requeue-batch "$SHORT_STEPS" docs/deploy/slurm.sbatch --time=5
REQUEUE_BATCH=$ID
SAVED+=(requeue-batch)
submit requeue-step "$SHORT_STEPS" docs/deploy/slurm-step.sbatch --time=5
REQUEUE_STEP=$ID
SAVED+=(requeue-step)
submit preempt-batch "$SHORT_STEPS" docs/deploy/slurm.sbatch --time=10 --partition=low --ntasks=4
SAVED+=(preempt-batch)
submit preempt-step "$SHORT_STEPS" docs/deploy/slurm-step.sbatch --time=10 --partition=low --ntasks=4
SAVED+=(preempt-step)
# Without --signal: SIGTERM, to a step when the grace time begins, to a batch script when it is over.
submit preempt-term-batch "$SHORT_STEPS" "$DIR/exec.sbatch" --time=10 --partition=low --ntasks=4
SAVED+=(preempt-term-batch)
submit preempt-term-step "$SHORT_STEPS" "$DIR/term-step.sbatch" --time=10 --partition=low --ntasks=4
SAVED+=(preempt-term-step)
submit bare-usr1 "$LONG_STEPS" "$DIR/bare-step.sbatch" --time=2 --signal=USR1@30
BARE_USR1=$ID
IGNORING=
submit bare-term "$SHORT_STEPS" "$DIR/bare-batch.sbatch" --time=5
BARE_TERM=$ID

for name in requeue-batch requeue-step preempt-batch preempt-step preempt-term-batch preempt-term-step bare-term; do
    until_line "$name" '^step 5 ' 60
done
say ""
say "scontrol requeue of requeue-batch, requeue-step and bare-term; a job of the partition high wants the processors of the four in low"
scontrol requeue "$REQUEUE_BATCH,$REQUEUE_STEP,$BARE_TERM"
HIGH=$(sbatch --parsable --job-name=high --output="$DIR/high.out" --partition=high --time=1 --ntasks="$HIGH_WANTS" --wrap 'date +"high runs at %T"; sleep 5')
JOBS+=("$HIGH")

# The uninterrupted runs, meanwhile, one after the other.
references() {
    local name steps
    for name in "${SAVED[@]}"; do
        case $name in limit-*) steps=$LONG_STEPS ;; *) steps=$SHORT_STEPS ;; esac
        job_flags "$name" "$steps"
        EMULATED_CUDA="memory=64MiB;node=$$" LD_LIBRARY_PATH=$EMULATED_DRIVER_DIR "$TESTKIT" "${FLAGS[@]}" >"$DIR/$name.lines"
    done
}
start references.log references
REFERENCES=$STARTED

# Until all have ended; what changes is printed.
declare -A LAST
ALL=("${SAVED[@]}" bare-usr1 bare-term high)
while :; do
    OPEN=0
    for index in "${!JOBS[@]}"; do
        now=$(state "${JOBS[index]}")
        if [ "${LAST[$index]:-}" != "$now" ]; then
            LAST[$index]=$now
            say "  $(printf '%4d s' $((SECONDS - SINCE))) ${ALL[index]}: $now"
        fi
        case $now in COMPLETED* | FAILED* | CANCELLED* | TIMEOUT* | NODE_FAIL*) ;; *) OPEN=$((OPEN + 1)) ;; esac
    done
    [ "$OPEN" -gt 0 ] || break
    [ $((SECONDS - SINCE)) -lt "$PATIENCE" ] || fail "$OPEN jobs have not ended after $PATIENCE s"
    sleep 1
done

say ""
say "What they said:"
for name in "${SAVED[@]}"; do
    say "  $name"
    grep -vE '^(step|done) ' "$DIR/$name.out" | sed 's/^/    /'
done
wait "$REFERENCES" || fail "an uninterrupted run failed"
for name in "${SAVED[@]}"; do
    digests "$DIR/$name.lines" >"$DIR/expected"
    digests "$DIR/$name.out" >"$DIR/seen"
    diff "$DIR/expected" "$DIR/seen" >"$DIR/difference.lines" || fail "$name: digests differ from those of the uninterrupted run"
    LIVES=$(grep -cE '^(ready|suspended) pid ' "$DIR/$name.out")
    [ "$LIVES" -eq 2 ] || fail "$name had $LIVES lives, not 2"
    grep -q 'exit 75: start it again' "$DIR/$name.out" || fail "$name was not saved and ended"
    say "  $name: OK, $(wc -l <"$DIR/seen") digests of 2 lives equal the uninterrupted run's; $(grep -oE 'notice from signal: [A-Z0-9]+' "$DIR/$name.out")"
done
# So docs/deploy says.
must_hear() {
    grep -q "notice from signal: $2;" "$DIR/$1.out" || fail "$1 did not hear $2"
}
for name in limit-batch limit-exec limit-step preempt-batch preempt-step; do must_hear "$name" SIGUSR1; done
for name in requeue-step preempt-term-batch preempt-term-step; do must_hear "$name" SIGTERM; done
# The script passes SIGTERM on as SIGUSR1, where it alone has it.
must_hear requeue-batch "$([ "$PROCTRACK" = proctrack/cgroup ] && echo SIGUSR1 || echo SIGTERM)"
# proctrack/cgroup signals only what slurmstepd itself started; the others signal all that they find, the supervised job too.
for name in bare-usr1:10 bare-term:15; do
    if [ "$PROCTRACK" = proctrack/cgroup ]; then
        END="exit 75: start it again"
    else
        END="the job was ended by signal ${name#*:}"
    fi
    name=${name%:*}
    grep -q "$END" "$DIR/$name.out" || fail "$name: no line with '$END'"
    say "  $name: as it must be: $END"
done
[ "$PROCTRACK" = proctrack/cgroup ] || [ "$(state "$BARE_USR1")" = "FAILED restarts 0 exit 138:0" ] || fail "bare-usr1: $(state "$BARE_USR1")"
say ""
say "slurm-test: OK in $SECONDS s: ${#SAVED[@]} jobs were saved, requeued and finished"
