#!/usr/bin/env python3
"""Runs ckptstream and its peers side by side and writes what came out; scripts/bench-peers.sh prepares and starts it.

In: the programs, the wheel that the data is made from, and which rows to run. Out: each figure beside its bar on standard output, and a report with
a plot in a folder. Ends with 1 when a bar is missed, with 2 when a run fails.

A row is one comparison: participants that get the same bytes and the same server, in turns. ckptstream's side is the emulated driver on this machine,
in the ckptstream process itself: the target holds still, and it, the server and the data are not counted.
"""

import argparse
import os
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import report
from harness import BUCKET, Bench, BenchError, Runs, Server, interleaved

MIB, GIB = 1 << 20, 1 << 30
HERE = Path(__file__).resolve().parent
# What a full run needs: a target of 8 GiB beside a file or an image of 8 GiB, or a target of 16 GiB; and the processes.
FULL_MEMORY = 18 * GIB
# A machine with more to do than this gives no figures.
BUSY_LOAD = 0.5
KINDS = ["random", "zero", "fp32", "bf16", "fp16", "adam", "kv", "int8", "image"]
S5CMD_FLAGS = ["--concurrency", "8", "--part-size", "16"]
RCLONE_FLAGS = ["--s3-chunk-size", "16M", "--s3-upload-concurrency", "8", "--s3-no-check-bucket", "--s3-disable-checksum"]


@dataclass
class Figure:
    """A figure beside what it must reach; `at_least` or at most."""

    what: str
    value: float
    bar: float
    unit: str
    at_least: bool = False

    @property
    def passes(self):
        return self.value >= self.bar if self.at_least else self.value <= self.bar


@dataclass
class Row:
    """What a row came to."""

    name: str
    title: str
    participants: list = field(default_factory=list)
    figures: list = field(default_factory=list)
    notes: list = field(default_factory=list)


@dataclass
class Sizes:
    """How many bytes each kind of row moves, and how often."""

    run_count: int
    large: int
    medium: int
    any: int
    stored: int
    reference: int
    growth_file: int
    growth: tuple
    small: int
    links: tuple

    @staticmethod
    def full(run_count):
        links = ((50, 2 * GIB), (200, 2 * GIB), (800, 8 * GIB))
        return Sizes(run_count, 8 * GIB, 2 * GIB, 4 * GIB, 512 * MIB, 512 * MIB, GIB, (4 * GIB, 16 * GIB), 64 * MIB, links)

    @staticmethod
    def quick():
        links = ((50, 32 * MIB), (200, 64 * MIB), (800, 128 * MIB))
        return Sizes(1, 128 * MIB, 64 * MIB, 64 * MIB, 32 * MIB, 32 * MIB, 32 * MIB, (64 * MIB, 256 * MIB), 64 * MIB, links)


class Comparison:
    """The participants and the rows."""

    def __init__(self, bench, sizes, s5cmd):
        self.bench = bench
        self.sizes = sizes
        self.s5cmd = s5cmd
        self.venv_bin = Path(sys.executable).parent

    # The participants. Each is one run: a fresh key or job, and a fresh target.

    def config(self, mode):
        """A configuration file with this compression mode; none says nothing, as a user who turns no knob."""
        path = self.bench.dir / f"mode-{mode}.toml"
        value = f'"{mode}"' if isinstance(mode, str) else mode
        path.write_text(f"[compression]\nmode = {value}\n" if mode is not None else "")
        return path

    def save_command(self, pid, server, job, mode):
        where = ["--job", job, "--store", f"s3://{BUCKET}/bench", "--endpoint", server.endpoint]
        return [self.bench.ckptstream, "checkpoint", "--pid", str(pid), *where, "--config", self.config(mode), "--progress", "none"]

    def save(self, server, file, size, mode=None):
        with self.bench.target(file, size, "lazy") as target:
            command = self.save_command(target.pid, server, f"save-{self.bench.serial()}", mode)
            return self.bench.measure(command, self.bench.cuda_env(size, "lazy"), server)

    def restore(self, server, file, size, job):
        """Into a fresh, suspended process, whose emulated memory is resident and mapped: that is no memory of ckptstream's."""
        with self.bench.target(file, size, "resident", is_suspended=True) as target:
            where = ["--job", job, "--store", f"s3://{BUCKET}/bench", "--endpoint", server.endpoint]
            command = [self.bench.ckptstream, "restore", "--pid", str(target.pid), "--into-fresh", *where, "--progress", "none"]
            run = self.bench.measure(command, self.bench.cuda_env(size, "resident"), server)
        run.peak_bytes = max(run.peak_bytes - size, 0)
        return run

    def peer(self, server, command, stdin=None):
        key = f"peer-{self.bench.serial()}"
        filled = [str(word).replace("KEY", key) for word in command]
        return self.bench.measure(filled, self.bench.client_env(server), server, stdin)

    def python_peer(self, script, *args):
        return [sys.executable, HERE / script, *args]

    def obstore_put(self, file, how="put"):
        return self.python_peer("obstore_client.py", how, file, "KEY")

    def s5cmd_pipe(self):
        return [self.s5cmd, "pipe", *S5CMD_FLAGS, f"s3://{BUCKET}/KEY"]

    def zstd_pipe(self, file, key="KEY"):
        put = f'"$2" pipe {" ".join(S5CMD_FLAGS)} s3://{BUCKET}/{key}'
        return ["bash", "-o", "pipefail", "-c", f'zstd -1 -T2 -q -c "$1" | {put}', "bash", file, self.s5cmd]

    def rclone_rcat(self, server):
        remote = f":s3,provider=Other,env_auth,endpoint='{server.endpoint}':{BUCKET}/KEY"
        return [self.venv_bin / "rclone", "--config", "", "rcat", *RCLONE_FLAGS, remote]

    def runs(self, participants):
        """All runs of all participants. A participant: raw length, the command as it is shown, and what runs it once."""
        done = interleaved(self.sizes.run_count, {name: once for name, (_, _, once) in participants.items()})
        return {name: Runs(name, raw, shown, done[name]) for name, (raw, shown, _) in participants.items()}

    def saving(self, server, file, size, mode=None):
        shown = "ckptstream checkpoint" + (f" with mode = {mode!r}" if mode is not None else "")
        return size, shown, partial(self.save, server, file, size, mode)

    def peering(self, server, size, command, stdin=None):
        shown = " ".join(shown_word(word) for word in command) + (" < FILE" if stdin else "")
        return size, shown, partial(self.peer, server, command, stdin)

    # The rows.

    def incompressible(self):
        size = self.sizes.large
        file = self.bench.data("random", size)
        with Server(self.bench, "--null") as server:
            by = self.runs(
                {
                    "ckptstream": self.saving(server, file, size),
                    "obstore writer": self.peering(server, size, self.obstore_put(file)),
                    "s5cmd pipe": self.peering(server, size, self.s5cmd_pipe(), file),
                }
            )
        ours = by["ckptstream"]
        figures = [
            times("rate against obstore", ours.rate, by["obstore writer"].rate, 0.9),
            times("rate against s5cmd pipe", ours.rate, by["s5cmd pipe"].rate, 3),
            Figure("our CPU seconds per GB", ours.cpu_per_gb, 0.72, "s"),
        ]
        return Row("incompressible", f"incompressible, {shown_size(size)} → null", list(by.values()), figures)

    def image(self):
        size = self.sizes.large
        file = self.bench.data("image", size)
        with Server(self.bench, "--null") as server:
            by = self.runs(
                {
                    "ckptstream": self.saving(server, file, size),
                    "zstd -1 | s5cmd": self.peering(server, size, self.zstd_pipe(file)),
                    "obstore writer": self.peering(server, size, self.obstore_put(file)),
                }
            )
        ours, raw = by["ckptstream"], by["obstore writer"]
        figures = [
            times("rate against zstd -1 -T2 | s5cmd pipe", ours.rate, by["zstd -1 | s5cmd"].rate, 3),
            times("rate against the best raw peer", ours.rate, raw.rate, 1.2),
            share("sent, of the raw peer's bytes", ours.received, raw.received, 0.38),
        ]
        return Row("image", f"served-model image, {shown_size(size)} → null", list(by.values()), figures)

    def bf16(self):
        size = self.sizes.large
        file = self.bench.data("bf16", size)
        with Server(self.bench, "--null") as server:
            by = self.runs(
                {
                    "ckptstream": self.saving(server, file, size),
                    "obstore writer": self.peering(server, size, self.obstore_put(file)),
                }
            )
        ours, raw = by["ckptstream"], by["obstore writer"]
        figures = [
            times("rate against the best raw peer", ours.rate, raw.rate, 1.0),
            share("sent, of the raw peer's bytes", ours.received, raw.received, 0.68),
        ]
        return Row("bf16", f"bf16 weights, {shown_size(size)} → null", list(by.values()), figures)

    def stored(self):
        size = self.sizes.stored
        row = Row("stored", f"stored bytes, {shown_size(size)} each")
        bars = {"bf16": 0.68, "fp32": 0.83, "adam": 0.65, "image": 0.38, "kv": 0.09}
        with Server(self.bench, "--null", "--rate", "200MB/s") as limited, Server(self.bench, "--null") as unlimited:
            for kind, bar in bars.items():
                file = self.bench.data(kind, size)
                by = self.runs(
                    {
                        f"{kind} at 200 MB/s": self.saving(limited, file, size),
                        f"{kind} max-ratio": self.saving(unlimited, file, size, "max-ratio"),
                    }
                )
                row.participants += by.values()
                row.figures += [share(f"{name}: stored", runs.received, size, bar) for name, runs in by.items()]
        return row

    def link(self):
        """Against the least seconds that any fixed mode could need: its stored bytes over the link, if two cores keep up with the link in it."""
        row = Row("link", "limited by the link: bf16 weights")
        size = self.sizes.reference
        file = self.bench.data("bf16", size)
        modes = ["auto", "max-ratio", 9, 3, 1, "none"]
        with Server(self.bench, "--null") as server:
            by_mode = {mode: self.runs({"reference": self.saving(server, file, size, mode)})["reference"] for mode in modes}
        for mode, runs in by_mode.items():
            stored = f"{runs.received / size:.1%} stored, {runs.rate / 1e6:.0f} MB/s of raw bytes"
            row.notes.append(f"reference, {shown_size(size)} → null, mode {mode}: {stored}")
        for megabytes, size in self.sizes.links:
            file = self.bench.data("bf16", size)
            with Server(self.bench, "--null", "--rate", f"{megabytes}MB/s") as server:
                ours = self.runs({f"{megabytes} MB/s": self.saving(server, file, size)})[f"{megabytes} MB/s"]
            sustained = {
                mode: runs.received / runs.raw for mode, runs in by_mode.items() if runs.rate * runs.received / runs.raw >= megabytes * 1e6
            }
            # A link that no mode fills is as fast as the fastest mode.
            mode = min(sustained, key=sustained.get) if sustained else max(by_mode, key=lambda mode: by_mode[mode].rate)
            floor = by_mode[mode].received / by_mode[mode].raw * size / (megabytes * 1e6)
            row.participants.append(ours)
            row.figures.append(times(f"{megabytes} MB/s, {shown_size(size)}: seconds against stored ÷ link of mode {mode}", ours.seconds, floor, 1.06, False))
        return row

    def restore_image(self):
        size = self.sizes.large
        with Server(self.bench) as server:
            file = self.keep(server, "image", size)
            put = self.zstd_pipe(self.bench.data("image", size), "kept.zst")
            self.bench.measure(put, self.bench.client_env(server), server)
            self.bench.drop_data()
            get = f'"$1" cat {" ".join(S5CMD_FLAGS)} s3://{BUCKET}/kept.zst | zstd -dc >/dev/null'
            command = ["bash", "-o", "pipefail", "-c", get, "bash", self.s5cmd]
            by = self.runs(
                {
                    "ckptstream": self.restoring(server, file, size),
                    "s5cmd cat | zstd -dc": self.peering(server, size, command),
                }
            )
        figures = [times("rate against s5cmd cat | zstd -dc", by["ckptstream"].rate, by["s5cmd cat | zstd -dc"].rate, 3)]
        return Row("restore-image", f"restore, served-model image, {shown_size(size)}", list(by.values()), figures)

    def keep(self, server, kind, size):
        """Saves an image as job `kept`. The file goes before the image comes: file, target and image of 8 GiB each would not fit beside one another."""
        file = self.bench.data(kind, size)
        with self.bench.target(file, size, "lazy") as target:
            self.bench.drop_data()
            self.bench.measure(self.save_command(target.pid, server, "kept", None), self.bench.cuda_env(size, "lazy"), server)
        return file

    def restoring(self, server, file, size):
        return size, "ckptstream restore --into-fresh", partial(self.restore, server, file, size, "kept")

    def restore_incompressible(self):
        """The peer reads the very object that holds our image: nearly the same bytes, since they did not compress."""
        size = self.sizes.large
        with Server(self.bench) as server:
            file = self.keep(server, "random", size)
            command = self.python_peer("obstore_client.py", "get-largest", "bench/")
            by = self.runs(
                {
                    "ckptstream": self.restoring(server, file, size),
                    "obstore get_range × 8": self.peering(server, size, command),
                }
            )
        figures = [times("rate against obstore get_range × 8", by["ckptstream"].rate, by["obstore get_range × 8"].rate, 0.8)]
        return Row("restore-incompressible", f"restore, incompressible, {shown_size(size)}", list(by.values()), figures)

    def downloads(self):
        """No bar, as `uploads`; all peers read the object of one of them."""
        size = self.sizes.medium
        with Server(self.bench) as server:
            put = self.obstore_put(self.bench.data("random", size))
            self.bench.measure([str(word).replace("KEY", "raw/object") for word in put], self.bench.client_env(server), server)
            file = self.keep(server, "random", size)
            url = f"s3://{BUCKET}/raw/object"
            drop = ["bash", "-c", '"$@" >/dev/null', "bash"]
            by = self.runs(
                {
                    "ckptstream": self.restoring(server, file, size),
                    "obstore get_range × 8": self.peering(server, size, self.python_peer("obstore_client.py", "get-largest", "raw/")),
                    "s5cmd cat": self.peering(server, size, [*drop, self.s5cmd, "cat", *S5CMD_FLAGS, url]),
                    "aws s3 cp": self.peering(server, size, [*drop, self.venv_bin / "aws", "s3", "cp", "--quiet", url, "-"]),
                }
            )
        return Row("downloads", f"every peer, restore, incompressible, {shown_size(size)}", list(by.values()))

    def never_slower(self):
        size = self.sizes.any
        row = Row("never-slower", f"any input, {shown_size(size)} → null, against mode = none")
        with Server(self.bench, "--null") as server:
            for kind in KINDS:
                file = self.bench.data(kind, size)
                auto, none = f"{kind}, auto", f"{kind}, none"
                by = self.runs({auto: self.saving(server, file, size), none: self.saving(server, file, size, "none")})
                row.participants += by.values()
                row.figures.append(times(f"{kind}: seconds against none", by[auto].seconds, by[none].seconds, 1.05, False))
        return row

    def growth(self):
        """The target's memory repeats a file: a file of the whole length would not fit beside it."""
        few, many = self.sizes.growth
        file = self.bench.data("bf16", self.sizes.growth_file)
        with Server(self.bench, "--null") as server:
            by = self.runs({shown_size(size): self.saving(server, file, size) for size in (few, many)})
        less, more = by[shown_size(few)], by[shown_size(many)]
        figures = [
            times(f"seconds of {shown_size(many)} against {shown_size(few)}", more.seconds, less.seconds, 4.1, False),
            times("peak memory, likewise", more.peak_bytes, less.peak_bytes, 1.05, False),
        ]
        notes = [f"the memory repeats a file of {shown_size(self.sizes.growth_file)}; by 'same peak memory' at most 5 % more is meant"]
        return Row("growth", "cost grows with bytes, memory does not: bf16 weights → null", list(by.values()), figures, notes)

    def small(self):
        size = self.sizes.small
        file = self.bench.data("random", size)
        with Server(self.bench, "--null") as server:
            by = self.runs(
                {
                    "ckptstream": self.saving(server, file, size),
                    "s5cmd pipe": self.peering(server, size, self.s5cmd_pipe(), file),
                }
            )
        figures = [times("seconds against s5cmd pipe", by["ckptstream"].seconds, by["s5cmd pipe"].seconds, 1.0, False)]
        return Row("small", f"whole process, incompressible, {shown_size(size)} → null", list(by.values()), figures)

    def uploads(self):
        """No bar: all peers, so that it is seen which one is the best."""
        size = self.sizes.medium
        file = self.bench.data("random", size)
        with Server(self.bench, "--null") as server:
            aws = [self.venv_bin / "aws", "s3", "cp", "--quiet", "-", f"s3://{BUCKET}/KEY"]
            by = self.runs(
                {
                    "ckptstream": self.saving(server, file, size),
                    "obstore writer": self.peering(server, size, self.obstore_put(file)),
                    "obstore writer, signed": self.peering(server, size, self.obstore_put(file, "put-signed")),
                    "boto3 with CRT": self.peering(server, size, self.python_peer("boto3_put.py", "crt", file, "KEY")),
                    "s5cmd pipe": self.peering(server, size, self.s5cmd_pipe(), file),
                    "rclone rcat": self.peering(server, size, self.rclone_rcat(server), file),
                    "boto3": self.peering(server, size, self.python_peer("boto3_put.py", "classic", file, "KEY")),
                    "aws s3 cp": self.peering(server, size, aws, file),
                }
            )
        return Row("uploads", f"every peer, incompressible, {shown_size(size)} → null", list(by.values()))

    def rows(self):
        return {
            "incompressible": self.incompressible,
            "image": self.image,
            "bf16": self.bf16,
            "stored": self.stored,
            "link": self.link,
            "restore-image": self.restore_image,
            "restore-incompressible": self.restore_incompressible,
            "never-slower": self.never_slower,
            "growth": self.growth,
            "small": self.small,
            "uploads": self.uploads,
            "downloads": self.downloads,
        }


def times(what, ours, other, bar, at_least=True):
    return Figure(what, ours / other, bar, "×", at_least)


def share(what, ours, whole, bar):
    return Figure(what, 100 * ours / whole, 100 * bar, "%")


def shown_size(size):
    return f"{size // GIB} GiB" if size % GIB == 0 else f"{size // MIB} MiB"


def shown_word(word):
    """A word of a command as a reader would type it."""
    word = str(word)
    name = Path(word).name
    if word == sys.executable:
        return "python"
    if name == "data.bin":
        return "FILE"
    if word.startswith("/"):
        return name
    return f"'{word}'" if " " in word or "'" in word else word


def main():
    parser = argparse.ArgumentParser(prog="bench-peers.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, one run: checks the script, says nothing about speed")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="runs of each participant [default: 5]")
    parser.add_argument("--only", metavar="ROW,…", help="only these rows")
    parser.add_argument("--out", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--bin-dir", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--driver-dir", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--wheel", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--s5cmd", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--memory-dir", type=Path, required=True, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.runs < 1:
        parser.error("--runs takes 1 or more")

    if not args.quick and (available := available_memory()) < FULL_MEMORY:
        parser.error(f"{available / GIB:.1f} GiB of memory are available, and full sizes need {FULL_MEMORY // GIB}; --quick needs little")
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        print(f"bench-peers: WARNING: the load is {load:.1f}: this machine is busy, and no figure will be right", file=sys.stderr)
    # What is started and made is cleared away on a signal too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Data, logs and emulated GPU memory lie in memory: no disk takes part.
    with tempfile.TemporaryDirectory(prefix="bench-peers-", dir=args.memory_dir) as folder:
        bench = Bench(Path(folder), args.bin_dir, args.driver_dir, args.wheel)
        comparison = Comparison(bench, Sizes.quick() if args.quick else Sizes.full(args.runs), args.s5cmd)
        return run(comparison, args, parser, load)


def available_memory():
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def run(comparison, args, parser, load):
    """Runs the rows, prints them and writes the report; returns the exit status."""
    rows = comparison.rows()
    names = args.only.split(",") if args.only else list(rows)
    unknown = [name for name in names if name not in rows]
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(rows)}")

    done = []
    for name in names:
        try:
            row = rows[name]()
        except BenchError as error:
            print(f"bench-peers: row {name}: {error}", file=sys.stderr)
            return 2
        done.append(row)
        print("\n".join(report.plain(row)), flush=True)
    report.write(args.out, done, comparison.sizes.run_count, args.s5cmd, load)
    figures = [figure for row in done for figure in row.figures]
    missed = [figure for figure in figures if not figure.passes]
    print(f"bench-peers: {len(figures) - len(missed)} of {len(figures)} bars reached; report in {args.out}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
