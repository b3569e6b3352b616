"""Prints a result of benchmarks/flash.py as the table that the README shows: python benchmarks/table.py benchmarks/results/flash-h200.json"""

import json
import sys
from pathlib import Path
from typing import Any


def figures(row: dict[str, Any]) -> str:
    """TFLOP/s and the ratios of one direction: none to what does not take the shape."""
    ratios = [f"{row['ratio'][baseline]:.2f}" if baseline in row["ratio"] else "-" for baseline in ("cudnn", "fa2")]
    return " | ".join([f"{row['tflops']['tilewise']:.0f}", *ratios])


def table(path: Path) -> str:
    """A row a shape and mask: TFLOP/s forward and backward, each with its ratio to cuDNN and to FlashAttention-2."""
    rows = json.loads(path.read_text())["rows"]
    lines = ["| bf16 | forward TFLOP/s | × cuDNN | × FA-2 | backward TFLOP/s | × cuDNN | × FA-2 |", "|---|---|---|---|---|---|---|"]
    for forward, backward in zip(rows[::2], rows[1::2], strict=True):
        name = "B {batch}, T {tokens}, H {heads}, D {channels}".format(**forward) + (", causal" if forward["causal"] else "")
        lines.append(f"| {name} | {figures(forward)} | {figures(backward)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
