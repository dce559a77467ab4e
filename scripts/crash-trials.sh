#!/usr/bin/env bash
# Kills ckptstream, panics it, or takes store and spill away from it, at random steps of saves, spills, resumes, restores and recovers, and has a fresh process look at what is left: the old image or the new one,
# whole, and the target as it was said to be.
#
# usage: crash-trials.sh [N [SEED]]     trials (300), and the seed of the first (random; printed)
# A trial that fails prints its seed; `crash-trials.sh 1 SEED` is the same one again. Needs a Rust toolchain, and makes the one build.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

need_build_tools
build_all
EMULATED_DRIVER_DIR=$(emulated_driver_dir)
export EMULATED_DRIVER_DIR CARGO_MANIFEST_DIR=$PWD CRASH_TRIALS=${1:-300}
if [ -n "${2:-}" ]; then
    export CRASH_SEED=$2
fi
# The newest of the test binary's builds: cargo has just made it, or found it fresh.
TESTS=$(find "$TARGET_DIR/release/deps" -maxdepth 1 -name 'it-*' -executable -type f -printf '%T@ %p\n' | sort -rn | sed -n '1s/^[^ ]* //p')
[ -n "$TESTS" ] || fail "the integration tests are not in $TARGET_DIR/release/deps"
"$TESTS" crash::trials --exact --ignored --nocapture
say "crash-trials: OK, $CRASH_TRIALS trials in $SECONDS s"
