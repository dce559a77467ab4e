"""What is in docs/deploy, held against a small schema and against ckptstream itself. Called by deploy-check.sh.

usage: deploy_check.py CKPTSTREAM DIR     the program, and a directory for temporary files
"""

import configparser
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import yaml

CKPTSTREAM, DIR = sys.argv[1], Path(sys.argv[2])
DEPLOY = Path("docs/deploy")
# `run` and `watch` end with 200 and a verdict, and so is a refusal told apart from a command line that is not understood.
UNDERSTOOD = {"run": {203}, "watch": {203}, "notify": {3}, "status": {3}, "list": {6}}
# The fields that the examples use, of kinds that have hundreds. A list holds any number of its one member; a type is that of a scalar.
POD_SPEC = {
    "restartPolicy": str, "terminationGracePeriodSeconds": int, "shareProcessNamespace": bool,
    "containers": [{
        "name": str, "image": str, "command": [str], "args": [str],
        "lifecycle": {"preStop": {"exec": {"command": [str]}}},
        "env": [{"name": str, "value": str}], "envFrom": [{"secretRef": {"name": str}}],
        "resources": {"limits": {"nvidia.com/gpu": int}},
        "securityContext": {"capabilities": {"add": [str]}},
        "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}],
    }],
    "volumes": [{"name": str, "configMap": {"name": str}, "emptyDir": {}}],
}
HEAD = {"apiVersion": str, "kind": str, "metadata": {"name": str}}
KINDS = {
    ("v1", "ConfigMap"): HEAD | {"data": {"ckptstream.toml": str}},
    ("v1", "Pod"): HEAD | {"spec": POD_SPEC},
    ("batch/v1", "Job"): HEAD | {"spec": {
        "backoffLimit": int, "podReplacementPolicy": str,
        "podFailurePolicy": {"rules": [{
            "action": str, "onExitCodes": {"containerName": str, "operator": str, "values": [int]},
            "onPodConditions": [{"type": str, "status": str}],
        }]},
        "template": {"spec": POD_SPEC},
    }},
}
UNIT = {
    "Unit": {"Description", "Wants", "After"},
    "Service": {"Type", "TimeoutStartSec", "WatchdogSec", "User", "Environment", "EnvironmentFile", "ExecStart", "RuntimeDirectory", "RuntimeDirectoryMode", "RuntimeDirectoryPreserve", "KillMode",
                "TimeoutStopSec", "SuccessExitStatus", "RestartForceExitStatus", "RestartSec"},
    "Install": {"WantedBy"},
}
counted = {"command lines": 0, "TOML snippets": 0, "YAML documents": 0}


def fail(where, what):
    sys.exit(f"deploy_check.py: {where}: {what}")


def check(where, value, schema):
    """The value has no field that the schema lacks, and the types of the schema."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            fail(where, f"{value!r} is no mapping")
        for name, member in value.items():
            if name not in schema:
                fail(where, f"no field {name}")
            check(f"{where}.{name}", member, schema[name])
    elif isinstance(schema, list):
        if not isinstance(value, list) or not value:
            fail(where, f"{value!r} is no list with members")
        for index, member in enumerate(value):
            check(f"{where}[{index}]", member, schema[0])
    elif type(value) is not schema:
        fail(where, f"{value!r} is no {schema.__name__}")


def ckptstream(args, config):
    environment = {name: value for name, value in os.environ.items() if name != "CKPTSTREAM_CONFIG"}
    done = subprocess.run([CKPTSTREAM, *args], env=environment | {"CKPTSTREAM_CONFIG": str(config)}, capture_output=True, text=True, timeout=20)
    return done.returncode, done.stderr.strip()


def parsed(where, words):
    """A command line, behind `ckptstream`: understood as it stands, up to what the configuration then refuses."""
    words = [word for index, word in enumerate(words) if word != "--config" and words[index - 1] != "--config"]
    code, told = ckptstream(words, DIR / "refused.toml")
    if code not in UNDERSTOOD[words[0]]:
        fail(where, f"ckptstream {shlex.join(words)}: ended with {code}: {told}")
    counted["command lines"] += 1


def loaded(where, text):
    """A configuration: every key exists, every value is one. The store is replaced by one that is there."""
    path = DIR / "snippet.toml"
    store = f"file://{DIR}/store"
    # `list` looks at what stands in it; `run` at what is meant for itself, too, and refuses a job that cannot be restored. Sockets and journals stay in our directory.
    tame = re.sub(r"^state_dir = .*$", f'state_dir = "{DIR}/state"', re.sub(r"^restore_command = .*$", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    for text, args, understood in [(text, ["list", "--store", store], 6), (tame, ["run", "--store", store, "--", "true"], 203)]:
        path.write_text(text)
        code, told = ckptstream(args, path)
        if code != understood:
            fail(where, f"ckptstream {args[0]} ended with {code}: {told}\n{text}")
    counted["TOML snippets"] += 1


def in_command_lines(where, text):
    """Every ckptstream in shell text."""
    for line in text.splitlines():
        line = line.strip().removeprefix("$ ")
        # Not the same word in prose, in a comment or in a table.
        if not line.startswith("ckptstream "):
            continue
        words = shlex.split(line, comments=True)[1:]
        parsed(where, [word for word in words if word not in ("&", "…")])


def seconds(where, text, pattern):
    found = re.search(pattern, text, re.MULTILINE)
    if not found:
        fail(where, f"nothing like {pattern}")
    return int(found[1])


def pod(where, spec, config):
    names = {volume["name"]: volume for volume in spec["volumes"]}
    grace = spec["terminationGracePeriodSeconds"]
    if seconds(where, config, r'^notice = "(\d+)s"$') != grace:
        fail(where, "preempt.notice is not terminationGracePeriodSeconds")
    watched = [container for container in spec["containers"] if not any("ckptstream" in word for word in container["command"] + container.get("args", []))]
    if watched:
        sidecar(where, spec, watched)
    for container in spec["containers"]:
        if container in watched:
            continue
        mounts = {mount["mountPath"]: names.get(mount["name"]) for mount in container["volumeMounts"]}
        if None in mounts.values():
            fail(where, "a mount without a volume")
        state = re.search(r'^state_dir = "(.*)/[^/]+"$', config, re.MULTILINE)[1]
        if "emptyDir" not in (mounts.get(state) or {}):
            fail(where, f"job.state_dir is not in a directory of the volume at {state}")
        environment = {pair["name"]: pair["value"] for pair in container["env"]}
        if environment["CKPTSTREAM_CONFIG"].rpartition("/")[0] not in mounts:
            fail(where, "no volume for CKPTSTREAM_CONFIG")
        if container["command"][0] == "ckptstream":
            parsed(where, container["command"][1:])
        else:
            subprocess.run(["sh", "-n", "-c", *container["args"]], check=True)
            in_command_lines(where, container["args"][0])
        if "lifecycle" in container:
            hook = container["lifecycle"]["preStop"]["exec"]["command"]
            parsed(where, hook[1:])
            left = seconds(where, " ".join(hook), r"--left (\d+)s")
            if not grace - 10 <= left < grace:
                fail(where, "--left is not a little less than terminationGracePeriodSeconds")


def sidecar(where, spec, watched):
    """What the sidecar looks for is the command of the one other container, which SIGTERM does not end."""
    if not spec.get("shareProcessNamespace") or spec["restartPolicy"] != "Never":
        fail(where, "a sidecar needs shareProcessNamespace, and a job that is not started again beside its image")
    (command,) = [container["command"] for container in watched]
    (looks,) = [container["command"] for container in spec["containers"] if container not in watched]
    word = looks[looks.index("--command") + 1]
    if word not in [each.rpartition("/")[2] for each in command] or "--ignore-signal=TERM" not in command or "--wait" not in looks:
        fail(where, f"{looks} does not find {command}, or both have SIGTERM")


def job(where, spec, documented):
    rules = spec["podFailurePolicy"]["rules"]
    if spec["template"]["spec"]["restartPolicy"] != "Never" or spec["podReplacementPolicy"] != "Failed":
        fail(where, "a podFailurePolicy needs restartPolicy: Never and podReplacementPolicy: Failed")
    containers = {container["name"] for container in spec["template"]["spec"]["containers"]}
    for rule in rules:
        if rule["action"] not in ("Ignore", "FailJob", "Count") or ("onExitCodes" in rule) == ("onPodConditions" in rule):
            fail(where, f"a rule that is none: {rule}")
        codes = rule.get("onExitCodes")
        if not codes:
            continue
        values = codes["values"]
        if codes["operator"] not in ("In", "NotIn") or codes["containerName"] not in containers or values != sorted(set(values)):
            fail(where, f"exit codes: {codes}")
        for value in values:
            if value != 75 and value - 200 not in documented:
                fail(where, f"{value} is not in docs/exit-codes.md")
        if (values == [75]) != (rule["action"] == "Ignore"):
            fail(where, "75 is what is ignored, and nothing else")


def unit(where, text):
    parser = configparser.RawConfigParser(strict=True, comment_prefixes=("#",), inline_comment_prefixes=None)
    parser.optionxform = str
    parser.read_string(text)
    for section in parser.sections():
        unknown = set(parser[section]) - UNIT.get(section, set())
        if unknown:
            fail(where, f"[{section}] {unknown}")
    service = parser["Service"]
    parsed(where, shlex.split(service["ExecStart"])[1:])
    if service["KillMode"] != "mixed" or service["SuccessExitStatus"] != "75" or "75" not in service["RestartForceExitStatus"].split():
        fail(where, "what becomes of status 75, and who gets SIGTERM")
    return int(service["TimeoutStopSec"].removesuffix("s"))


exit_codes = Path("docs/exit-codes.md").read_text()
documented = {int(code) for code in re.findall(r"^\| (\d+) \|", exit_codes, re.MULTILINE)}

objects, config = [], None
for path in sorted(DEPLOY.glob("*.yaml")):
    for document in yaml.safe_load_all(path.read_text()):
        key = (document.get("apiVersion"), document.get("kind"))
        if key not in KINDS:
            fail(path, f"{key} is not known here")
        check(f"{path}: {key[1]}", document, KINDS[key])
        counted["YAML documents"] += 1
        objects.append((path, document))
        if key[1] == "ConfigMap":
            config = document["data"]["ckptstream.toml"]
            loaded(path, config)
for path, document in objects:
    if document["kind"] == "Pod":
        pod(path, document["spec"], config)
    elif document["kind"] == "Job":
        pod(path, document["spec"]["template"]["spec"], config)
        job(path, document["spec"], documented)

readme = (DEPLOY / "README.md").read_text()
snippets = []
for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL):
    if language == "toml":
        loaded("README.md", text)
        snippets.append(text)
    else:
        in_command_lines("README.md", text)
stop = unit(DEPLOY / "ckptstream.service", (DEPLOY / "ckptstream.service").read_text())
if not any(seconds("README.md", text, r'^notice = "(\d+)s"$') == stop and "/run/ckptstream" in text for text in snippets):
    fail("README.md", "no configuration for ckptstream.service with its TimeoutStopSec as preempt.notice")
for path in DEPLOY.glob("*.sbatch"):
    before = seconds(path, path.read_text(), r"^#SBATCH --signal=(?:B:)?USR1@(\d+)$")
    if not any(seconds("README.md", text, r'^notice = "(\d+)s"$') == before and "--ignore-signal=USR1" in text for text in snippets):
        fail(path, "README.md has no configuration with its --signal as preempt.notice")
for name in re.findall(r"\]\(([^)#:]+)\)", readme):
    if not (DEPLOY / name).exists():
        fail("README.md", f"no file {name}")
for line in sorted(set(re.findall(r"`((?:job|store|spill|preempt)\.[a-z_]+)", readme))):
    table, key = line.split(".")
    if not re.search(rf"^(# )?{key} =", Path("config.example.toml").read_text(), re.MULTILINE):
        fail("README.md", f"no key {line}")
for what, count in counted.items():
    print(f"  {count} {what}")
