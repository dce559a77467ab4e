#!/usr/bin/env bash
# How many instructions each loop over bytes takes per KiB: figures that do not shiver, whatever else the machine does. They say whether a change made a loop
# longer; they do not say how fast it is. For that there is `cargo bench --bench micro`.
#
# valgrind's callgrind counts two runs of benches/instructions.rs that differ by one pass over 512 KiB. It has no AVX-512 (and no wide AES or CLMUL), so what is
# counted is what a CPU with AVX2 runs: its own kernel, the portable one beside it, and the narrower digest and checksum.
#
# usage: bench-instructions.sh [PATTERN]     only the loops whose name matches the extended regular expression
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

PATTERN=${1:-.}
PASS_KIB=512
need_build_tools
need valgrind valgrind
valgrind --tool=callgrind --callgrind-out-file=/dev/null /bin/true >/dev/null 2>&1 || fail "valgrind does not run here: $(valgrind --tool=callgrind --callgrind-out-file=/dev/null /bin/true 2>&1 | tail -n 1)"

# Cargo says where it puts the program.
HARNESS=$(cargo bench --workspace --bench instructions --no-run --locked 2>&1 | tee /dev/stderr | sed -n 's/^ *Executable .*(\(.*\))$/\1/p')
[ -x "$HARNESS" ] || fail "cargo names no program of benches/instructions.rs"

# instructions LOOP PASSES: all that the program takes, from its start to its end.
instructions() {
    local log
    log=$(valgrind --tool=callgrind --callgrind-out-file=/dev/null "$HARNESS" "$@" 2>&1) || fail "$1 fails under valgrind: $log"
    sed -n 's/^==[0-9]*== Collected : \([0-9]*\)$/\1/p' <<<"$log" | grep . || fail "valgrind counted nothing for $1: $log"
}

say "date: $(date -u +%Y-%m-%dT%H:%M:%SZ)"
say "commit: $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
say "host: $(nproc) cores, $(awk '/^model name/ {sub(/.*: /, ""); print; exit}' /proc/cpuinfo)"
say "$(rustc --version), $(valgrind --version)"
say ""
printf '%-34s %s\n' loop 'instructions per KiB'
LOOPS=$("$HARNESS" | grep -E -- "$PATTERN") || fail "no loop matches '$PATTERN'"
for LOOP in $LOOPS; do
    # The first pass may choose a kernel and touch buffers for the first time.
    ONE=$(instructions "$LOOP" 1)
    TWO=$(instructions "$LOOP" 2)
    printf '%-34s %8.1f\n' "$LOOP" "$(awk -v n="$((TWO - ONE))" -v kib="$PASS_KIB" 'BEGIN { print n / kib }')"
done
