"""What every comparison needs: servers, targets, and processes that are measured.

In: commands. Out: [`Run`]s with wall seconds, CPU seconds of the whole process tree, peak memory, and the body bytes that the server took and
gave. A process that fails, or a server that dies, ends the comparison with its last words.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

GB = 1e9
BUCKET = "ckpt"
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
# How long a server or a target may take to be ready, in seconds: a target of 16 GiB is filled at 1 to 2 GB/s.
READY_SECONDS_MAX = 120


class BenchError(Exception):
    """Why a comparison cannot go on."""


@dataclass
class Run:
    """One measured process."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    received: int
    sent: int
    server_cpu_seconds: float


@dataclass
class Runs:
    """All runs of one participant in a row; `raw` is what the bytes were before anybody compressed them."""

    name: str
    raw: int
    command: str
    runs: list

    def median(self, figure):
        return median(figure(run) for run in self.runs)

    @property
    def seconds(self):
        return self.median(lambda run: run.seconds)

    @property
    def rate(self):
        return self.raw / self.seconds

    @property
    def cpu_per_gb(self):
        return self.median(lambda run: run.cpu_seconds) / (self.raw / GB)

    @property
    def server_cpu_per_gb(self):
        return self.median(lambda run: run.server_cpu_seconds) / (self.raw / GB)

    @property
    def received(self):
        return self.median(lambda run: run.received)

    @property
    def sent(self):
        return self.median(lambda run: run.sent)

    @property
    def peak_bytes(self):
        return max(run.peak_bytes for run in self.runs)


class Process:
    """A background process that prints a line when it is ready; killed by its pid when it is left."""

    def __init__(self, command, env, log, ready):
        self.log = log
        with open(log, "wb") as out:
            self.child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        try:
            self.ready_line = self._wait_for(ready)
        except BaseException:
            self.stop()
            raise

    def _wait_for(self, prefix):
        deadline = time.monotonic() + READY_SECONDS_MAX
        while time.monotonic() < deadline:
            has_ended = self.child.poll() is not None
            for line in self.log.read_text().splitlines(keepends=True):
                if line.startswith(prefix) and line.endswith("\n"):
                    return line.strip()
            if has_ended:
                break
            time.sleep(0.01)
        raise BenchError(f"no line `{prefix}…` from {self.child.args}:\n{self.log.read_text()}")

    @property
    def pid(self):
        return self.child.pid

    def cpu_seconds(self):
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS

    def stop(self):
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGKILL)
        self.child.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class Server(Process):
    """A `testkit s3`, whose log says how many bytes came and went."""

    def __init__(self, bench, *flags):
        self.requests = bench.dir / f"requests-{bench.serial()}"
        self.offset = 0
        command = [bench.testkit, "s3", "--bucket", BUCKET, "--log", self.requests, *flags]
        super().__init__(command, bench.env, bench.dir / f"s3-{bench.serial()}.log", "listening ")
        self.endpoint = self.ready_line.removeprefix("listening ")

    def taken_and_given(self):
        """Body bytes since the last call."""
        with open(self.requests) as log:
            log.seek(self.offset)
            lines = log.readlines()
            self.offset = log.tell()
        requests = [json.loads(line) for line in lines]
        return sum(request["bytes_in"] for request in requests), sum(request["bytes_out"] for request in requests)


class Bench:
    """Where programs and files are, and how processes are run."""

    def __init__(self, folder, bin_dir, driver_dir, wheel):
        self.dir = folder
        self.ckptstream = f"{bin_dir}/ckptstream"
        self.testkit = f"{bin_dir}/testkit"
        self.driver_dir = driver_dir
        self.wheel = wheel
        self.env = dict(os.environ)
        self._serial = 0
        self._data = None

    def serial(self):
        self._serial += 1
        return self._serial

    def data(self, kind, size):
        """A file of this kind in memory. One is kept at a time: two of 8 GiB and a target would not fit beside each other."""
        if self._data != (kind, size):
            self.drop_data()
            maker = Path(__file__).with_name("make_data.py")
            subprocess.run([sys.executable, maker, self.wheel, kind, str(size), self.dir / "data.bin"], check=True)
            self._data = (kind, size)
        return self.dir / "data.bin"

    def drop_data(self):
        self._data = None
        (self.dir / "data.bin").unlink(missing_ok=True)

    def cuda_env(self, size, vram):
        """The environment of a process that uses the emulated GPU. It has twice the memory: what is resident counts as used before a restore."""
        cuda = f"gpus=1;memory={2 * size};vram={vram};memory-dir={self.dir};node={os.getpid()}"
        return {**self.env, "LD_LIBRARY_PATH": self.driver_dir, "EMULATED_CUDA": cuda}

    def target(self, file, size, vram, is_suspended=False):
        """A process that holds `size` bytes of the file in GPU memory, or, suspended, waits for them."""
        command = [self.testkit, "target", "--bytes", str(size), "--fill", f"file:{file}", "--steps", "0", "--digest-every", "0"]
        ready = "ready pid "
        if is_suspended:
            command.append("--suspended")
            ready = "suspended pid "
        return Process(command, self.cuda_env(size, vram), self.dir / f"target-{self.serial()}.log", ready)

    def client_env(self, server):
        """What peers take their endpoint from."""
        return {**self.env, "AWS_ENDPOINT_URL": server.endpoint, "S3_ENDPOINT_URL": server.endpoint, "BENCH_BUCKET": BUCKET}

    def measure(self, command, env, server, stdin=None):
        """Runs a command to its end and says what it cost. `stdin` is a file that it reads."""
        log = self.dir / "client.log"
        server.taken_and_given()
        with open(stdin or os.devnull, "rb") as source, open(log, "wb") as out:
            server_cpu = server.cpu_seconds()
            start = time.monotonic()
            child = subprocess.Popen(command, env=env, stdin=source, stdout=out, stderr=subprocess.STDOUT)
            # The usage covers what the child itself has waited for: the parts of a shell's pipeline.
            try:
                _, status, usage = os.wait4(child.pid, 0)
            except BaseException:
                child.kill()
                child.wait()
                raise
            seconds = time.monotonic() - start
            child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            raise BenchError(f"{command} ended with {child.returncode}:\n{log.read_text()[-4000:]}")
        received, sent = server.taken_and_given()
        return Run(
            seconds=seconds,
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            peak_bytes=usage.ru_maxrss << 10,
            received=received,
            sent=sent,
            server_cpu_seconds=server.cpu_seconds() - server_cpu,
        )


def interleaved(count, participants):
    """Runs each participant `count` times or a little more, in turns, each one first as often as the others: a machine under this one takes back the memory
    that lies free, and whoever comes first in a round waits for it, up to half a second. Gives their runs by name."""
    runs = {name: [] for name in participants}
    names = list(participants)
    for round_index in range(-(-count // len(names)) * len(names)):
        turn = round_index % len(names)
        for name in names[turn:] + names[:turn]:
            runs[name].append(participants[name]())
    return runs
