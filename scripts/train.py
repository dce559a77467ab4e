"""A small training job for scripts/gpu-whole.sh: a language model of a few layers, Adam, deterministic, one loss a line, to the last bit.

usage: train.py STEPS [WORKERS]     WORKERS data loader processes, 0 if not said
"""

import os
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn

VOCABULARY, LENGTH, WIDTH, BATCH = 512, 128, 256, 16


class Text(torch.utils.data.Dataset):
    """Random text that is the same for the same index, made on the CPU."""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        start = torch.randint(VOCABULARY, (1,), generator=generator)
        steps = torch.randint(1, 4, (LENGTH + 1,), generator=generator)
        return (start + steps.cumsum(0)) % VOCABULARY


def main():
    steps, workers = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    # Workers that are forked after the first CUDA call have the GPU driver's memory mapped, which CRIU cannot save: these are there before it.
    batches = iter(torch.utils.data.DataLoader(Text(), BATCH, num_workers=workers))
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.TransformerEncoder(layer, 4), nn.Linear(WIDTH, VOCABULARY)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    print(f"pid {os.getpid()}", flush=True)
    for step, batch in enumerate(batches):
        if step == steps:
            break
        batch = batch.cuda()
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item().hex()} {loss.item():.6f}", flush=True)
        time.sleep(0.02)
    print("done", flush=True)


if __name__ == "__main__":
    main()
