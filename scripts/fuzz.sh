#!/usr/bin/env bash
# Feeds what ckptstream reads out of a store, and nobody vouches for, to a fuzzer: manifests and tables, log entries, frames.
#
# usage: fuzz.sh [SECONDS [TARGET...]]     seconds for each target (600; 0 tries the known inputs only), and which ones (all)
# A target that fails leaves its input, and how to run that again is printed. Inputs that reached something new are kept beside the build and serve the
# next run; KEEP=yes puts a few of them that reach most edges into fuzz/corpus. SANITIZER=address finds more, and is slower.
# Needs a Rust toolchain; installs what else it misses on Debian and Ubuntu. A first build takes ten minutes.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

DURATION=${1:-600}
[ "$#" -eq 0 ] || shift
TARGETS=("$@")
[ "$#" -gt 0 ] || TARGETS=(manifest log_entry frame)
SANITIZER=${SANITIZER:-none}
CARGO_FUZZ_VERSION=0.13.2
# What is committed stays small: longer inputs reach little more, and each further one a single edge.
KEPT_LEN_MAX=4096
KEPT_COUNT=66

need_build_tools
# libFuzzer is C++.
need g++ c++
need python3 python3
if [ "$SANITIZER" != none ]; then
    # A stable compiler has the sanitizers too, and takes the flag only so. Without one this script needs no such thing.
    export RUSTC_BOOTSTRAP=1
fi

TOOLS=$TARGET_DIR/tools
if [ "$("$TOOLS/bin/cargo-fuzz" --version 2>/dev/null)" != "cargo-fuzz $CARGO_FUZZ_VERSION" ]; then
    say "installing cargo-fuzz $CARGO_FUZZ_VERSION into $TOOLS"
    cargo install --quiet --locked --root "$TOOLS" --version "$CARGO_FUZZ_VERSION" cargo-fuzz
fi
say "building"
BUILD=$TARGET_DIR/fuzz-$SANITIZER
"$TOOLS/bin/cargo-fuzz" build --sanitizer "$SANITIZER" --target-dir "$BUILD"
PROGRAMS=$BUILD/$(rustc -vV | sed -n 's/^host: //p')/release

SEEDS=$TARGET_DIR/fuzz-seeds
rm -rf "$SEEDS"
python3 fuzz/seeds.py tests/golden/v1 "$SEEDS"

# figure LOG NAME: what libFuzzer says of it at the end.
figure() {
    sed -n "s/^stat::$2: *//p" "$1"
}

# run_target TARGET: fuzzes it and tells how it went; false when an input failed.
run_target() {
    local target=$1 found=$TARGET_DIR/fuzz-found/$1 artifacts=fuzz/artifacts/$1 log=$TARGET_DIR/fuzz-found/$1.log
    mkdir -p "$found" "$artifacts" "fuzz/corpus/$target"
    local limit=(-max_total_time="$DURATION")
    [ "$DURATION" -gt 0 ] || limit=(-runs=0)
    # Inputs that take long are tried less often: a frame of a long chunk costs as much as a hundred short ones.
    if ! "$PROGRAMS/$target" "${limit[@]}" -print_final_stats=1 -entropic_scale_per_exec_time=1 -timeout=20 -rss_limit_mb=2048 \
        -dict="$SEEDS/json.dict" -artifact_prefix="$artifacts/" "$found" "fuzz/corpus/$target" "$SEEDS/$target" >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        say "$target: FAILED; again: $PROGRAMS/$target $(sed -n 's/.*Test unit written to //p' "$log")"
        return 1
    fi
    local last
    last=$(grep -E '^#[0-9]+.* cov: ' "$log" | tail -n 1)
    say "$target: OK, $(figure "$log" number_of_executed_units) inputs, $(figure "$log" average_exec_per_sec)/s," \
        "cov $(sed -E 's/.* cov: ([0-9]+) ft: ([0-9]+) corp: ([0-9]+).*/\1 edges, \2 features, corpus \3/' <<<"$last"), $(figure "$log" peak_rss_mb) MiB"
}

# keep TARGET: a few short inputs that reach most edges become the committed corpus.
keep() {
    local target=$1 work
    work=$(mktemp -d)
    mkdir "$work/merged" "$work/kept"
    "$PROGRAMS/$target" -merge=1 -use_counters=0 -max_len="$KEPT_LEN_MAX" -merge_control_file="$work/control" \
        "$work/merged" "fuzz/corpus/$target" "$TARGET_DIR/fuzz-found/$target" "$SEEDS/$target" >/dev/null 2>&1
    python3 fuzz/pick.py "$work/control" "$KEPT_COUNT" "$work/kept"
    rm -rf "fuzz/corpus/$target"
    cp -r "$work/kept" "fuzz/corpus/$target"
    rm -rf "$work"
}

FAILED=()
for target in "${TARGETS[@]}"; do
    say "== $target"
    run_target "$target" || FAILED+=("$target")
    if [ "${KEEP:-}" = yes ]; then
        keep "$target"
    fi
done
[ "${#FAILED[@]}" -eq 0 ] || fail "failed: ${FAILED[*]}"
say "fuzz: OK in $SECONDS s"
