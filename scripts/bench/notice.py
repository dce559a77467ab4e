"""What the traces of a notice, and of waiting for one, say. Called by bench-notice.sh.

usage: notice.py first-part TRACE LOG
       notice.py idle SECONDS HANDLER TRACE STATUS WATCHED ALONE

`first-part` reads the call trace of the emulated driver and the request log of the S3 server, which have one clock, after one save. It prints milliseconds after the return of
cuCheckpointProcessCheckpoint: until the bytes of the first part were copied from the GPU, and until its request was at the server.

`idle` looks at a handler (pid) for some seconds, and at two jobs meanwhile, one that it watches over and one that nobody does (files with their output). STATUS is a file with the answer of
`status --json`. It prints: CPU seconds, resident bytes, bytes of pinned host memory, looks at the state of a process, all other calls of the driver, steps per second of the two, and the first as a percentage of the second.
"""

import json
import os
import sys
import time
from pathlib import Path

LOOK = "cuCheckpointProcessGetState"
CHECKPOINT = "cuCheckpointProcessCheckpoint"


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def first_part(trace, log):
    calls = lines(trace)
    begin = next(call for call in calls if call["call"] == CHECKPOINT and call["result"] == 0)
    devices = {extent["stream"]: extent["device"] for extent in begin["extents"]}
    parts = [request for request in lines(log) if request["op"] == "UploadPart" and request["t_us"] >= begin["end_us"]]
    first = min(parts, key=lambda request: request["t_us"])
    # The object's name has the GPU's.
    copied_calls = {call["seq"]: call for call in calls if call["pid"] == begin["pid"] and call["call"].startswith("cuMemcpyDtoHAsync")}
    of_its_gpu = [call for call in calls if call["call"] == "copy-done" and call["pid"] == begin["pid"] and call["seq"] in copied_calls
                  and devices.get(copied_calls[call["seq"]]["stream"], "-") in first["key"]]
    copied = 0
    for call in sorted(of_its_gpu, key=lambda call: call["done_us"]):
        copied += copied_calls[call["seq"]]["bytes"]
        # The job's memory is random, so that it takes as many bytes in the part.
        if copied >= first["bytes_in"]:
            print((call["done_us"] - begin["end_us"]) / 1000, (first["t_us"] - begin["end_us"]) / 1000, first["bytes_in"])
            return
    sys.exit(f"notice.py: {copied} bytes of the GPU of {first['key']} were copied, and the first part has {first['bytes_in']}")


def cpu_seconds(pid):
    # Behind the command, which may have blanks in it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def steps(output):
    last = [line for line in Path(output).read_text().splitlines() if line.startswith("step ")][-1]
    return int(last.split()[1])


def idle(seconds, handler, trace, status, watched, alone):
    def look():
        return time.clock_gettime(time.CLOCK_BOOTTIME), cpu_seconds(handler), steps(watched), steps(alone)

    before = look()
    time.sleep(float(seconds))
    after = look()
    took, cpu, of_watched, of_alone = (end - start for start, end in zip(before, after))
    resident = next(line for line in Path(f"/proc/{handler}/status").read_text().splitlines() if line.startswith("VmRSS:"))
    pinned = json.loads(Path(status).read_text())["status"]["armed_bytes"]
    calls = [call for call in lines(trace) if call["pid"] == int(handler) and before[0] * 1e6 <= call.get("t_us", call.get("enqueued_us", 0)) <= after[0] * 1e6]
    others = [call["call"] for call in calls if call["call"] != LOOK]
    if others:
        print(f"notice.py: not only looks at the state: {sorted(set(others))}", file=sys.stderr)
    print(cpu, int(resident.split()[1]) * 1024, pinned, len(calls) - len(others), len(others), of_watched / took, of_alone / took, 100 * of_watched / of_alone)


{"first-part": first_part, "idle": idle}[sys.argv[1]](*sys.argv[2:])
