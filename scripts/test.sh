#!/usr/bin/env bash
# Everything that must pass. Needs a Rust toolchain; installs what else it misses on Debian and Ubuntu.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

need_build_tools
need zstd zstd

# has_component NAME: cargo can run it. A toolchain of the minimal profile has neither of the two.
has_component() {
    cargo "$1" --version >/dev/null 2>&1
}

if has_component fmt; then
    say "== format"
    cargo fmt --all -- --check
else
    say "== format: not checked, rustfmt is not installed"
fi

say "== build"
build_all

if has_component clippy; then
    say "== lints"
    cargo clippy --release --workspace --all-targets --locked -- -D warnings
else
    say "== lints: not checked, clippy is not installed"
fi

say "== tests"
# NVIDIA's own header for the test that compiles against it; a stock S3 client and a stock zstd for those that read our objects with them.
TEST_PYTHON=$(python_with 'nvidia-cuda-runtime==13.5.*' boto3 zstandard)
CUDA_INCLUDE_DIR=$("$TEST_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib") + "/nvidia/cu13/include")')
[ -e "$CUDA_INCLUDE_DIR/cuda.h" ] || fail "the package nvidia-cuda-runtime has no cuda.h in $CUDA_INCLUDE_DIR"
EMULATED_DRIVER_DIR=$(emulated_driver_dir)
# Whole process trees need a real CRIU, and root for it.
TEST_CRIU=none
if [ "$(id -u)" -eq 0 ] && unshare --pid --fork --mount-proc true 2>/dev/null; then
    if ! TEST_CRIU=$(scripts/install-criu.sh); then
        # Ubuntu's archive has no suite of Debian's; where its own CRIU is too old there is none.
        ! grep -q '^ID=debian$' /etc/os-release || fail "CRIU could not be installed"
        say "not tested: whole process trees need CRIU 4.1 or newer, which this system's packages do not have"
        TEST_CRIU=none
    fi
else
    say "not tested: whole process trees need root, and pid namespaces"
fi
export TEST_PYTHON CUDA_INCLUDE_DIR EMULATED_DRIVER_DIR TEST_CRIU
# The tests' jobs would have open what we were started with, and CRIU saves nothing that is of another mount namespace. 255 is this script.
for open in "/proc/$$/fd"/*; do
    open=${open##*/}
    if [ "$open" -gt 2 ] && [ "$open" -ne 255 ]; then
        eval "exec $open>&-"
    fi
done
cargo test --release --workspace --all-targets --locked

say "== examples of docs/deploy"
BIN_DIR=$TARGET_DIR/release scripts/deploy-check.sh

say "== other S3 servers"
BIN_DIR=$TARGET_DIR/release scripts/test-stores.sh --ci

say "== process 1"
if [ "$(id -u)" -eq 0 ] && unshare --pid --fork --mount-proc true 2>/dev/null; then
    BIN_DIR=$TARGET_DIR/release scripts/pid1-test.sh
else
    say "not tested: a pid namespace needs root"
fi

say "== documentation examples"
cargo test --release --workspace --doc --locked

say "test: OK, all of it passed in $SECONDS s"
