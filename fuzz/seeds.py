"""Valid inputs for the fuzz targets, made of the golden images, and a dictionary of their words. Usage: seeds.py GOLDEN_FOLDER OUT_FOLDER"""

import json, pathlib, random, re, sys

golden, out = map(pathlib.Path, sys.argv[1:])

# As Filter::ALL has them.
FILTERS = "-bBdD"
# The modes of each target.
MANIFEST, MANIFEST_OWN_DIGEST, TABLE, TABLE_OWN_DIGEST, SEEK_TABLE = range(5)
STORED, BLOCKS, DAMAGED, PLANES = range(4)
FRONT, ENCODED_ANEW = 0x80, 0x40
HEADER_LEN = 10


def put(target, name, content):
    folder = out / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


def frame_input(mode, choice, raw_len):
    return bytes([mode, choice]) + raw_len.to_bytes(3, "little")


words = set()
for image in sorted(golden.iterdir()):
    name = image.name
    entry = next((image / "log").iterdir()).read_bytes()
    attempt = json.loads(entry)["attempt"]
    later = {
        "bad": {"generation": 1},
        "dropped": {"attempt": attempt},
        "finished": {"status": 0},
        "open": {},
        "saving": {"attempt": attempt, "seconds": 30, "spill": None},
    }
    put("log_entry", name, entry)
    for text in image.rglob("*.json"):
        words.update(re.findall(r'"[a-z0-9_-]+"', text.read_text()))
    for kind, members in later.items():
        second = {"format": 1, "entry": kind, "writer": attempt} | members
        put("log_entry", f"{name}-{kind}", entry + b"\0" + json.dumps(second).encode())
        words.update(f'"{word}"' for word in second)
        words.add(f'"{kind}"')

    manifest = (image / "data" / attempt / "manifest.json").read_bytes()
    # The target reads them all as of one job.
    manifest = manifest.replace(f'"job": "{name}"'.encode(), b'"job": "planes"')
    for mode in (MANIFEST, MANIFEST_OWN_DIGEST):
        put("manifest", f"{name}-manifest-{mode}", bytes([mode]) + manifest)

    for number, table_path in enumerate(sorted(image.rglob("*.frames.json"))):
        table_bytes = table_path.read_bytes()
        for mode in (TABLE, TABLE_OWN_DIGEST):
            put("manifest", f"{name}-table-{number}-{mode}", bytes([mode]) + table_bytes)
        table = json.loads(table_bytes)
        stored = table["stored"]
        filters = table.get("filters", "-" * len(stored))
        data = table_path.with_name(table_path.name.replace(".frames.json", ".zst")).read_bytes()
        put("manifest", f"{name}-seek-table-{number}", bytes([SEEK_TABLE]) + data[sum(stored):])

        offset = 0
        for index, (length, letter) in enumerate(zip(stored, filters)):
            raw_len = min(table["chunk_len"], table["raw_len"] - index * table["chunk_len"])
            frame = data[offset:offset + length]
            offset += length
            choice = FILTERS.index(letter)
            seed = f"{name}-{number}-{index}"
            put("frame", f"{seed}-stored", frame_input(STORED | ENCODED_ANEW, choice, raw_len) + frame)
            put("frame", f"{seed}-blocks", frame_input(BLOCKS | FRONT, choice, raw_len) + frame[HEADER_LEN:])
            put("frame", f"{seed}-planes", frame_input(PLANES, choice, 0) + frame[:3000])
            # No edits, and one in the header of the first block; elements of one, two and four bytes.
            for width in range(3):
                for edits in (b"\0", b"\1" + bytes([HEADER_LEN, 0, 8])):
                    content = frame_input(DAMAGED, width << 5 | 16 | number, 20_000) + edits + frame[64:364]
                    put("frame", f"{seed}-damaged-{width}-{edits[0]}", content)

# Few symbols make short Huffman codes, whose descriptions are easily changed into others that nearly fit.
for symbols in (2, 3, 5, 17, 60):
    content = bytes(random.Random(symbols).choices(range(symbols), [1.5**-at for at in range(symbols)], k=900))
    for choice in range(0, 32, 4):
        put("frame", f"alphabet-{symbols}-{choice}", frame_input(DAMAGED, choice, 3_000) + b"\0" + content)

lines = (word.replace('"', r"\"") for word in sorted(words))
(out / "json.dict").write_text("".join(f'"{line}"\n' for line in lines))
