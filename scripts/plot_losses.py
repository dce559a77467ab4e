"""Draws the losses that scripts/gpu-whole.sh has left, as SVG.

usage: plot_losses.py FILE… >OUT.svg     the first one is the undisturbed run; a restart shows in a file as lines behind it
"""

import os
import sys

WIDTH, HEIGHT, LEFT, TOP = 720, 360, 56, 40
COLOURS = ["#1b6ca8", "#d1495b", "#66a182"]

curves = []
for path in sys.argv[1:]:
    with open(path) as file:
        losses = [float.fromhex(line.split()[3]) for line in file if line.startswith("step ")]
    curves.append((os.path.basename(path).removeprefix("losses-").removesuffix(".txt"), losses))
top = max(max(losses) for _, losses in curves)
count = max(len(losses) for _, losses in curves)
x = lambda step: LEFT + step * (WIDTH - LEFT - 16) / (count - 1)
y = lambda loss: TOP + (1 - loss / top) * (HEIGHT - TOP - 40)
out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
for tick in range(int(top) + 1):
    out.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - 16}" stroke="#ddd"/><text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
for tick in range(0, count, 25):
    out.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - 20}" text-anchor="middle">{tick}</text>')
out.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 4}" text-anchor="middle">step</text><text x="16" y="{HEIGHT / 2}" transform="rotate(-90 16 {HEIGHT / 2})" text-anchor="middle">loss</text>')
for index, (name, losses) in enumerate(curves):
    points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(losses))
    colour = COLOURS[index % len(COLOURS)]
    # Curves that are equal lie on each other: the later ones are thinner, and dashed.
    style = f'stroke="{colour}" stroke-width="{5 - 2 * index}"' + (' stroke-dasharray="6 4"' if index else ' stroke-opacity="0.5"')
    out.append(f'<polyline points="{points}" fill="none" {style}/>')
    out.append(f'<text x="{LEFT + 8 + 200 * index}" y="20" fill="{colour}">{name} ({len(losses)} steps)</text>')
out.append("</svg>")
print("\n".join(out))
