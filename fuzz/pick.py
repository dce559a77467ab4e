"""The few inputs that reach most edges, out of what a libFuzzer merge found of each. Usage: pick.py CONTROL_FILE COUNT OUT_FOLDER"""

import pathlib, sys

control, count, out = open(sys.argv[1]).read().splitlines(), int(sys.argv[2]), pathlib.Path(sys.argv[3])

# File count, how many of them were there before, the names; then a line "FT index edge edge …" for each.
paths = [pathlib.Path(name) for name in control[2:2 + int(control[0])]]
edges = {}
for line in control[2 + len(paths):]:
    kind, index, *found = line.split()
    if kind == "FT":
        edges[paths[int(index)]] = set(found)

reached = set()
for _ in range(count):
    best = max(edges, key=lambda path: (len(edges[path] - reached), -path.stat().st_size))
    if not edges[best] - reached:
        break
    reached |= edges.pop(best)
    (out / best.name).write_bytes(best.read_bytes())
print(f"kept {len(list(out.iterdir()))} inputs that reach {len(reached)} edges")
