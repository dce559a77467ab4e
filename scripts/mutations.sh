#!/usr/bin/env bash
# Shows that the tests of the guarantees are not vacuous: each patch in tests/mutations takes one protection away, and the tests that it names must then fail.
#
# usage: mutations.sh [NAME...]     the patches whose names contain one of these (all)
# Works on a throw-away worktree of HEAD, with a dev build of its own: what is not committed is not looked at. Takes minutes for that build and about half a minute for each patch.
# CKPTSTREAM_MUTATION_TARGET=DIR keeps the build for the next time, and what every test said in DIR/mutations. Needs a Rust toolchain.
set -euo pipefail

WORK=$(mktemp -d "${TMPDIR:-/tmp}/ckptstream-mutations.XXXXXX")
export CARGO_TARGET_DIR=${CKPTSTREAM_MUTATION_TARGET:-$WORK/target}
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
export CARGO_TARGET_DIR=$TARGET_DIR
# The path is a part of what cargo knows a build by, so a build that is kept has its worktree beside it.
TREE=$WORK/tree
[ -z "${CKPTSTREAM_MUTATION_TARGET:-}" ] || TREE=$TARGET_DIR/tree
LOGS=$TARGET_DIR/mutations
# Only a test that hangs takes so long.
HANGS_AFTER=300

clean_up() {
    cd "$ROOT"
    [ ! -e "$TREE" ] || git worktree remove --force "$TREE"
    rm -rf "$WORK"
    git worktree prune
}

# head_of PATCH MEMBER: what the patch's head says after `MEMBER: `; nothing where it has no such line.
head_of() {
    sed -n -e '/^diff /q' -e "s/^$2: //p" "$1"
}

# build KIND: the tests of a kind (lib or it), and what they run.
build() {
    case $1 in
    lib) cargo test --workspace --locked --no-run --lib ;;
    it) cargo test --workspace --locked --no-run --test it ;;
    *) fail "no such kind of tests: $1" ;;
    esac
}

# run KIND SETTING LOG TEST: one test by its exact name, with this setting (NAME=VALUE, or nothing) in its environment. Status 124 or 137: it hangs.
declare -A BINARY
run() {
    env ${2:+"$2"} timeout -k 10 "$HANGS_AFTER" "${BINARY[$1]}" --exact "$4" >"$3" 2>&1 </dev/null
}

# first_words LOG: the first thing that a test complained of, in one line.
first_words() {
    awk '/ panicked at (src|tests|crates)\// { getline; print substr($0, 1, 200); exit }' "$1"
}

trap clean_up EXIT
trap 'exit 130' INT TERM HUP
need_build_tools
git worktree add --quiet --detach "$TREE" HEAD || fail "no worktree can be made in $TREE: is another mutations.sh at work, or was one killed?"
cd "$TREE"
mkdir -p "$LOGS"

say "== build of $(git rev-parse --short HEAD)"
# Nobody debugs these.
export CARGO_PROFILE_DEV_DEBUG=0
cargo build --workspace --all-targets --locked
for kind in lib it; do
    build "$kind" 2>&1 | tee "$LOGS/build.log"
    BINARY[$kind]=$(sed -n 's/^ *Executable .*(\(.*\/\(ckptstream\|it\)-[0-9a-f]*\))$/\1/p' "$LOGS/build.log")
    [ -x "${BINARY[$kind]}" ] || fail "cargo does not say where the $kind tests are"
done
EMULATED_CUDA_LIB=$TARGET_DIR/debug/libemulated_cuda.so
export EMULATED_CUDA_LIB
EMULATED_DRIVER_DIR=$(emulated_driver_dir)
# Whole trees need a real CRIU, and root.
if [ -z "${TEST_CRIU:-}" ]; then
    TEST_CRIU=none
    [ "$(id -u)" -ne 0 ] || TEST_CRIU=$("$ROOT/scripts/install-criu.sh")
fi
export EMULATED_DRIVER_DIR TEST_CRIU CARGO_MANIFEST_DIR=$TREE

PATCHES=()
for patch in tests/mutations/*.patch; do
    name=$(basename "$patch" .patch)
    wanted=yes
    [ $# -eq 0 ] || wanted=
    for part in "$@"; do
        case $name in *"$part"*) wanted=yes ;; esac
    done
    [ -z "$wanted" ] || PATCHES+=("$name")
done
[ ${#PATCHES[@]} -gt 0 ] || fail "no patch in tests/mutations has such a name: $*"

say "== the tests as they are: all must pass"
# By kind, test and setting: what became of it.
declare -A UNPATCHED
for name in "${PATCHES[@]}"; do
    read -r kind tests <<<"$(head_of "tests/mutations/$name.patch" Test)"
    setting=$(head_of "tests/mutations/$name.patch" With)
    for test in $tests; do
        [ -z "${UNPATCHED[$kind $test $setting]:-}" ] || continue
        UNPATCHED[$kind $test $setting]=passes
        if ! run "$kind" "$setting" "$LOGS/unpatched.log" "$test" || ! grep -q '^test result: ok\. 1 passed' "$LOGS/unpatched.log"; then
            UNPATCHED[$kind $test $setting]=fails
            cat "$LOGS/unpatched.log"
            say "$kind $test does not pass"
        fi
    done
done
say "${#UNPATCHED[@]} tests tried"

say "== the mutations"
ROWS=()
FAILED=0
for name in "${PATCHES[@]}"; do
    patch=tests/mutations/$name.patch
    read -r kind tests <<<"$(head_of "$patch" Test)"
    setting=$(head_of "$patch" With)
    started=$SECONDS
    words=
    if ! git apply --check "$patch" 2>"$LOGS/$name.log"; then
        result='FAIL: does not apply'
    else
        git apply "$patch"
        if ! build "$kind" >"$LOGS/$name.log" 2>&1; then
            result='FAIL: does not compile'
        else
            result=caught
            for test in $tests; do
                if [ "${UNPATCHED[$kind $test $setting]}" = fails ]; then
                    result='FAIL: not without it either' && break
                fi
                status=0
                run "$kind" "$setting" "$LOGS/$name.log" "$test" || status=$?
                case $status in
                0) result='NOT CAUGHT' && break ;;
                124 | 137) result='caught (hangs)' ;;
                esac
            done
            words=$(first_words "$LOGS/$name.log")
        fi
        git apply --reverse "$patch"
    fi
    case $result in caught*) ;; *) FAILED=$((FAILED + 1)) ;; esac
    took=$((SECONDS - started))
    say "$(printf '%-22s %-36s %3d s  %s' "$result" "$name" "$took" "$words")"
    ROWS+=("| $name | $result | $took | $(head_of "$patch" Protects) | \`$kind ${tests// /\`, \`}\`${setting:+, $setting} |")
done

say
say '| mutation | result | s | protection that it takes away | held by |'
say '|---|---|---|---|---|'
printf '%s\n' "${ROWS[@]}"
say
[ "$FAILED" -eq 0 ] || fail "$FAILED of ${#PATCHES[@]} mutations were not caught"
say "mutations: OK, all ${#PATCHES[@]} were caught in $SECONDS s"
