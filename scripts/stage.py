"""What cuda-checkpoint does, by hand, for scripts/gpu-whole.sh: locks a process and has the driver copy its GPU memory into its host memory, or the way back.

usage: stage.py out|in PID
"""

import ctypes
import sys

cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *args):
    entry, status = ctypes.c_void_p(), ctypes.c_int()
    code = cuda.cuGetProcAddress_v2(name.encode(), ctypes.byref(entry), 12080, ctypes.c_uint64(0), ctypes.byref(status))
    assert code == 0 and entry.value, f"no {name}"
    code = ctypes.CFUNCTYPE(ctypes.c_int, *[type(arg) for arg in args])(entry.value)(*args)
    assert code == 0, f"{name} answered {code}"


direction, pid = sys.argv[1], ctypes.c_int(int(sys.argv[2]))
nothing = (ctypes.c_ubyte * 64)()
assert cuda.cuInit(0) == 0
if direction == "out":
    lock = (ctypes.c_uint * 16)(10000)
    call("cuCheckpointProcessLock", pid, ctypes.cast(lock, ctypes.c_void_p))
    call("cuCheckpointProcessCheckpoint", pid, ctypes.cast(nothing, ctypes.c_void_p))
else:
    call("cuCheckpointProcessRestore", pid, ctypes.cast(nothing, ctypes.c_void_p))
    call("cuCheckpointProcessUnlock", pid, ctypes.cast(nothing, ctypes.c_void_p))
