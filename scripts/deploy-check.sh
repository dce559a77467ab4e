#!/usr/bin/env bash
# Holds the examples of docs/deploy to the programs that they are for: batch scripts run against stand-ins of Slurm's commands, every ckptstream command line is parsed by ckptstream, every TOML
# snippet is loaded by it, YAML and the unit have only fields that exist, and numbers that belong together are equal. Takes seconds, and needs no GPU, Slurm, cluster or init.
#
# BIN_DIR names a folder with the program; without it it is built. Installs shellcheck and a Python environment where they are missing.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

need_programs
need shellcheck shellcheck
PYTHON=$(VENV_NAME=venv-deploy python_with 'PyYAML==6.*')

DIR=$(mktemp -d)
clean_up() {
    local status=$?
    trap - EXIT INT TERM
    rm -rf "$DIR"
    [ "$status" -eq 0 ] || say "deploy-check: FAILED, see above"
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
use_test_store

say "batch scripts"
bash -n docs/deploy/slurm.sbatch
bash -n docs/deploy/slurm-step.sbatch
shellcheck --shell=bash docs/deploy/*.sbatch
# Slurm's commands, as far as the scripts use them.
mkdir "$DIR/bin" "$DIR/store"
cat >"$DIR/bin/srun" <<'SH'
#!/bin/sh
while case $1 in --*) ;; *) false ;; esac do
    case $1 in
        --ntasks=[0-9]*) ;;
        *) echo "srun: $1 is not looked for here" >&2; exit 64 ;;
    esac
    shift
done
exec "$@"
SH
cat >"$DIR/bin/scontrol" <<SH
#!/bin/sh
echo "\$*" >>"$DIR/requeued"
SH
# Stands for one that has saved its job.
mkdir "$DIR/saved"
printf '#!/bin/sh\nexit 75\n' >"$DIR/saved/ckptstream"
chmod +x "$DIR"/bin/* "$DIR/saved/ckptstream"
# A configuration that `run` reads and refuses: it says how the job cannot be restored (203), which comes after the command line and before everything else.
cat >"$DIR/refused.toml" <<TOML
[job]
name = "deploy-check"
state_dir = "$DIR/state"
[store]
url = "file://$DIR/store"
TOML
for script in docs/deploy/*.sbatch; do
    grep -E '^#SBATCH ' "$script" | while read -r _ flag rest; do
        [ -z "$rest" ] || fail "$script: one flag a line: $flag $rest"
        [[ $flag =~ ^--(nodes=1|ntasks=1|requeue|open-mode=append|signal=(B:)?USR1@[0-9]+)$ ]] || fail "$script: $flag is not known here"
    done
    STATUS=0
    CKPTSTREAM_CONFIG=$DIR/refused.toml PATH=$DIR/bin:$BIN_DIR:$PATH SLURM_JOB_ID=17 bash "$script" true 2>"$DIR/err" || STATUS=$?
    [ "$STATUS" -eq 203 ] && grep -q job.restore_command "$DIR/err" || fail "$script: ended with $STATUS, not 203: $(cat "$DIR/err")"
    [ ! -e "$DIR/requeued" ] || fail "$script requeues what failed"
    STATUS=0
    PATH=$DIR/saved:$DIR/bin:$PATH SLURM_JOB_ID=17 bash "$script" true >/dev/null || STATUS=$?
    [ "$STATUS" -eq 75 ] && [ "$(cat "$DIR/requeued" 2>/dev/null)" = "requeue 17" ] || fail "$script: does not requeue what was saved"
    rm "$DIR/requeued"
done

say "YAML, TOML, command lines"
"$PYTHON" scripts/deploy_check.py "$BIN_DIR/ckptstream" "$DIR"

say "unit"
UNIT=$DIR/train.service
# Programs that exist on this machine.
sed -E "s|^ExecStart=/usr/local/bin/ckptstream |ExecStart=$BIN_DIR/ckptstream |; s|/usr/bin/python3|/bin/true|" docs/deploy/ckptstream.service >"$UNIT"
if command -v systemd-analyze >/dev/null; then
    # It warns of unknown keys, and ends with 0 then.
    WARNINGS=$(systemd-analyze verify "$UNIT" 2>&1 | grep -F "$UNIT" || true)
    [ -z "$WARNINGS" ] || fail "$WARNINGS"
else
    say "  read only by scripts/deploy_check.py: systemd-analyze is not installed"
fi
say "deploy-check: OK in $SECONDS s"
