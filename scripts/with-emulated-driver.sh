#!/bin/sh
# usage: with-emulated-driver.sh CMD [ARG...]
#
# Runs CMD with the emulated CUDA driver in the place of NVIDIA's: the loader finds its libcuda.so.1 first. CMD replaces this script, so pid
# and signals are its own. The environment variable EMULATED_CUDA describes the GPUs (docs/emulated-driver.md).
#
# The library is the release build of this repository, made here if it is missing; EMULATED_CUDA_LIB=PATH takes another one.
set -eu

if [ "$#" -eq 0 ]; then
    echo "usage: with-emulated-driver.sh CMD [ARG...]" >&2
    exit 2
fi

case $0 in
    */*) here=${0%/*} ;;
    *) here=. ;;
esac
root=$(CDPATH='' cd -- "$here/.." && pwd -P)
target=${CARGO_TARGET_DIR:-$root/target}
case $target in
    /*) ;;
    *) target=$(pwd -P)/$target ;;
esac

if [ -n "${EMULATED_CUDA_LIB:-}" ]; then
    library=$(readlink -f -- "$EMULATED_CUDA_LIB")
    [ -f "$library" ] || { echo "with-emulated-driver.sh: EMULATED_CUDA_LIB=$EMULATED_CUDA_LIB: no such file" >&2; exit 2; }
    # One folder per library, so that two of them can be in use at the same time.
    folder=$target/emulated-driver/$(printf '%s' "$library" | cksum | tr -c '0-9\n' -)
else
    library=$target/release/libemulated_cuda.so
    if [ ! -f "$library" ]; then
        # The selection of every other release build here, so that one set of features serves them all.
        (cd "$root" && CARGO_TARGET_DIR="$target" cargo build --release --workspace --all-targets >&2)
    fi
    folder=$target/emulated-driver/release
fi

if [ ! "$folder/libcuda.so.1" -ef "$library" ] || [ ! "$folder/libcuda.so" -ef "$library" ]; then
    mkdir -p "$folder"
    # Made aside and renamed: several of these may run at once.
    for name in libcuda.so.1 libcuda.so; do
        ln -sf -- "$library" "$folder/.$name.$$"
        mv -f -- "$folder/.$name.$$" "$folder/$name"
    done
fi

LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
exec "$@"
