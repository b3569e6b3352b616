"""Prints a result of benchmarks/flash.py as the table that the README shows: python benchmarks/table.py benchmarks/results/flash-h200.json"""

import json
import sys
from pathlib import Path


def table(path: Path) -> str:
    """A row a shape and mask: TFLOP/s forward and backward, each with its ratio to cuDNN and to FlashAttention-2."""
    rows = json.loads(path.read_text())["rows"]
    lines = ["| bf16 | forward TFLOP/s | × cuDNN | × FA-2 | backward TFLOP/s | × cuDNN | × FA-2 |", "|---|---|---|---|---|---|---|"]
    for forward, backward in zip(rows[::2], rows[1::2], strict=True):
        name = "B {batch}, T {tokens}, H {heads}, D {channels}".format(**forward) + (", causal" if forward["causal"] else "")
        cells = [f"{row['tflops']['tilewise']:.0f} | {row['ratio']['cudnn']:.2f} | {row['ratio']['fa2']:.2f}" for row in (forward, backward)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
