#!/usr/bin/env bash
# What ckptstream does on the GPU of this machine, held against the bars: copies against the copy engine's own rate, the whole pipeline out to a store that swallows and in
# from memory against the floor that its stages give, all measured in one run of `ckptstream bench`.
#
# usage: bench-gpu.sh [SIZE [RUNS]]     memory per GPU (64GiB) and runs of each measurement (5)
# Uses the release build if there is one (the GPU machine may have no Rust), else makes it. BIN_DIR names another folder with the programs, COMMIT the commit that they were
# built from, OUT the folder for bench.json and the Markdown table (docs/measurements/<date>-<gpu>-bench.md without it). KINDS are the kinds of data.
# The data is synthetic: see docs/bench.md for how it compares with real weights.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

SIZE=${1:-64GiB}
RUNS=${2:-5}
BIN_DIR=${BIN_DIR:-$TARGET_DIR/release}
KINDS=${KINDS:-zero random bf16 image}
if [ ! -x "$BIN_DIR/ckptstream" ]; then
    need_build_tools
    build_all
fi
need python3 python3
DIR=$(mktemp -d)
trap 'rm -rf "$DIR"' EXIT
unset CKPTSTREAM_CONFIG

DATA=()
for kind in $KINDS; do
    DATA+=(--data "$kind")
done
COMMAND=(bench --size "$SIZE" --runs "$RUNS" --to null "${DATA[@]}")
say "ckptstream ${COMMAND[*]}"
"$BIN_DIR/ckptstream" "${COMMAND[@]}" --json --progress plain >"$DIR/bench.json"

# lscpu and nvidia-smi say more than the program asks for; without them the report does.
CPU=$(lscpu 2>/dev/null | sed -n 's/^Model name: *//p' | head -n 1)
GPU=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | sort | uniq -c | sed 's/^ *//' | paste -sd ';' || true)
export CPU GPU COMMIT="${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}" COMMAND_LINE="ckptstream ${COMMAND[*]}"
python3 - "$DIR/bench.json" >"$DIR/bench.md" <<'PYTHON'
"""bench.json to a table with bars."""
import datetime, json, os, sys

COPY_BAR, PIPELINE_BAR = 0.95, 0.85
report = json.load(open(sys.argv[1]))
machine, conditions = report["machine"], report["conditions"]
gpus = os.environ["GPU"] or "; ".join(gpu["name"] for gpu in machine["gpus"])
missed = 0

def verdict(share, bar):
    global missed
    missed += share < bar
    return "pass" if share >= bar else f"**miss** by {(bar - share) * 100:.1f} points"

print(f"# `bench` on {gpus}\n")
print(f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC, commit {os.environ['COMMIT']}. {os.environ['CPU'] or machine['processor']}, {machine['cores']} processors, {gpus}.\n")
print(f"```console\n$ {os.environ['COMMAND_LINE']}\n```\n")
print(f"{conditions['size'] / 2**30:g} GiB per GPU, medians of {conditions['runs']} runs, {conditions['threads']} codec threads, chunks of {conditions['chunk_len'] >> 20} MiB, "
      f"memory budget {conditions['memory_budget'] / 2**30:.1f} GiB. The data is synthetic (docs/bench.md). GB = 10⁹ bytes.\n")
print("## Bars\n\n| what | figure | against | share | bar | |\n|---|---|---|---|---|---|")
rows = {row["stage"]: row for row in report["stages"] if row["data"] is None}
for stage, name in [("copy-out", "copy out into the ring, nothing behind it"), ("copy-in", "copy in from the ring, nothing before it")]:
    if stage in rows:
        rate, raw, share = rows[stage]["rate"], rows["raw-" + stage]["rate"], rows[stage]["share_of_raw"]
        print(f"| {name} | {rate / 1e9:.2f} GB/s | raw pinned {raw / 1e9:.2f} GB/s | {share:.1%} | ≥ {COPY_BAR:.0%} | {verdict(share, COPY_BAR)} |")
for row in report["pipeline"]:
    floor = row["floor"]
    limit = max(floor, key=floor.get)
    name = "whole pipeline out to null" if row["direction"] == "out" else "whole pipeline in from memory"
    print(f"| {name}, {row['data']} | {row['seconds']:.2f} s, {row['rate'] / 1e9:.2f} GB/s | floor {floor[limit]:.2f} s ({limit}) | {row['share_of_floor']:.1%} | ≥ {PIPELINE_BAR:.0%} | {verdict(row['share_of_floor'], PIPELINE_BAR)} |")
print("\n## Stages alone\n\n| stage | data | at once | GB/s | CPU-s/GB | stored |\n|---|---|---|---|---|---|")
for row in report["stages"]:
    rate = "swallowed" if row["rate"] is None else f"{row['rate'] / 1e9:.2f}"
    stored = "" if row["stored_share"] is None else f"{row['stored_share']:.1%}"
    print(f"| {row['stage']} | {row['data'] or ''} | {row['at_once']} | {rate} | {row['cpu_seconds_per_gb']:.3f} | {stored} |")
print("\n## Whole pipeline\n\n| way | data | seconds of each run | CPU-s/GB | stored | prepare | floor: copy, CPU, link | slowest stage |\n|---|---|---|---|---|---|---|---|")
for row in report["pipeline"]:
    floor, runs = row["floor"], ", ".join(f"{seconds:.2f}" for seconds in row["runs"])
    print(f"| {row['direction']} | {row['data']} | {runs} | {row['cpu_seconds_per_gb']:.3f} | {row['stored'] / row['raw']:.1%} | {row['prepare_seconds']:.2f} s | "
          f"{floor['copy']:.2f}, {floor['cpu']:.2f}, {floor['link']:.2f} s | {row['slowest_stage']} |")
print(f"\n{report['verdict']['sentence']}")
print(f"\n{'All bars are met.' if not missed else f'{missed} bars are missed.'}")
PYTHON

GPU_NAME=$(python3 -c 'import json, re, sys; gpus = json.load(open(sys.argv[1]))["machine"]["gpus"]; print(re.sub("[^a-z0-9]+", "-", gpus[0]["name"].lower().removeprefix("nvidia ")).strip("-"))' "$DIR/bench.json")
NAME=$(date -u +%Y-%m-%d)-$GPU_NAME-bench
WHERE=${OUT:-docs/measurements}
cp "$DIR/bench.md" "$WHERE/$NAME.md"
if [ -n "${OUT:-}" ]; then
    cp "$DIR/bench.json" "$OUT/$NAME.json"
fi
cat "$DIR/bench.md"
say ""
say "bench-gpu: OK in $SECONDS s, table in $WHERE/$NAME.md"
