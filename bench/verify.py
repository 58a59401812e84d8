"""What verify_every costs: a look at all parameters, as a share of forward and backward pass.

./run bench verify
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from topreduce.torch.verifying import fingerprint_of

EVERY = 100  # steps
ROUNDS = 15


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
    blocks = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(65, 384), blocks, nn.Linear(384, 65))
    entries = sum(each.numel() for each in model.parameters())
    text = torch.randint(65, (4, 128))

    def step() -> None:
        model.zero_grad()
        model(text).sum().backward()

    def look() -> None:
        fingerprint_of(model.parameters())

    rows: dict[str, list[float]] = {"step": [], "look": [], "look, again": []}
    for _ in range(ROUNDS + 1):
        for name, action in zip(rows, (step, look, look), strict=True):
            rows[name].append(seconds(action))
    whole, once, again = (statistics.median(each[1:]) for each in rows.values())
    print(
        f"{entries / 1e6:.1f} M parameters: step {1e3 * whole:.0f} ms; look {1e3 * once:.2f} ms, "
        f"again {1e3 * again:.2f} ms ({4e-9 * entries / once:.1f} GB/s): "
        f"{100 * once / EVERY / whole:.3f} % of a step if every {EVERY}"
    )


if __name__ == "__main__":
    main()
