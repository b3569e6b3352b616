"""How far a token's output differs in its last bits between ways to compute it: in steps of several sizes over a cache,
as a prefill, as training's forward.

python benchmarks/step_bits.py                      # the kernels: on a GPU, or interpreted in some three minutes
python benchmarks/step_bits.py --hopper             # interpreted, with Hopper's own kernels where it has them
python benchmarks/step_bits.py --backend cpu

Normally distributed queries, keys and values; 8 query and 2 KV heads. Differences are counted in units of the last
place, in the output's dtype, of the largest element of a token's output by one head; errors, of both, too: root mean
squares, against fp64.
"""

import argparse
import contextlib

from tilewise import interpreter

interpreter.use_where_no_gpu()

import torch  # noqa: E402

from tilewise import flash_attention, flash_attention_with_kvcache  # noqa: E402
from tilewise.ops._host import backend as host  # noqa: E402

TOKENS, HEADS, KV_HEADS = 1600, 8, 2
# Tokens that are compared: at edges of tiles and splits, and between them.
SAMPLE = (0, 63, 64, 127, 128, 200, 255, 256, 400, 511, 512, 513, 700, 800, 1023, 1024, 1300, 1599)


class Attention:
    """One sequence, and its tokens' outputs [len(SAMPLE), HEADS, D] by each way."""

    def __init__(self, dtype: torch.dtype, channels: int, backend: str, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = ((1, TOKENS, heads, channels) for heads in (HEADS, KV_HEADS, KV_HEADS))
        self.q, self.k, self.v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
        self.backend = backend
        exact = (x.double() for x in (self.q, self.k, self.v))
        self._truth = flash_attention(*exact, causal=True, backend="reference")[0, list(SAMPLE)]

    def steps(self, size: int, num_splits: int = 0) -> torch.Tensor:
        """By steps of `size` tokens; those with a token of the sample are computed, once each."""
        found: dict[int, torch.Tensor] = {}
        for start in sorted({token // size * size for token in SAMPLE}):
            end = min(start + size, TOKENS)
            q, options = self.q[0, start:end][None], {"num_splits": num_splits, "backend": self.backend}
            o = flash_attention_with_kvcache(q, self.k, self.v, cache_seqlens=end, **options)[0]
            found |= {token: o[token - start] for token in SAMPLE if start <= token < end}
        return torch.stack([found[token] for token in SAMPLE])

    def training(self) -> torch.Tensor:
        """By flash_attention over the whole sequence."""
        return flash_attention(self.q, self.k, self.v, causal=True, backend=self.backend)[0, list(SAMPLE)]

    def error(self, x: torch.Tensor) -> float:
        """The root mean square of the error of outputs."""
        return ((x.double() - self._truth) / units(x)).square().mean().sqrt().item()


def units(x: torch.Tensor) -> torch.Tensor:
    """The unit in the last place of the largest element of each row."""
    largest = x.double().abs().amax(-1, keepdim=True)
    return 2.0 ** (torch.floor(torch.log2(largest)) + torch.log2(torch.tensor(torch.finfo(x.dtype).eps)))


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton", choices=("triton", "cpu"))
    parser.add_argument("--hopper", action="store_true", help="as on Hopper, where kernels are interpreted")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if options.hopper:
            stack.enter_context(host.as_if_on(90))
            stack.enter_context(host.few_sms(2))
        print_table(options.backend)


def print_table(backend: str) -> None:
    """Each pair of ways, in each dtype and width."""
    device = "cuda" if torch.cuda.is_available() and backend == "triton" else "cpu"
    print("| dtype, D | compared | elements that differ | largest difference, ULPs | errors, ULPs |")
    print("|---|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for channels in (64, 128):
            run = Attention(dtype, channels, backend, device)
            one, unsplit, prefill, training = (
                run.steps(1),
                run.steps(1, num_splits=1),
                run.steps(TOKENS),
                run.training(),
            )
            rows = {
                "steps of 1, steps of 4": (one, run.steps(4)),
                "steps of 1, a prefill": (one, prefill),
                "steps of 1 with num_splits=1, a prefill": (unsplit, prefill),
                "a prefill, steps of 100": (prefill, run.steps(100)),
                "steps of 1, flash_attention": (one, training),
                "steps of 1 with num_splits=1, flash_attention": (unsplit, training),
                "a prefill, flash_attention": (prefill, training),
            }
            for name, (x, y) in rows.items():
                differ = 100 * (x != y).double().mean().item()
                most = ((x.double() - y.double()).abs() / units(x)).max().item()
                errors = f"{run.error(x):.2f}, {run.error(y):.2f}"
                kind = f"{str(dtype).removeprefix('torch.')}, {channels}"
                print(f"| {kind} | {name} | {differ:.2f} % | {most:.2g} | {errors} |", flush=True)


if __name__ == "__main__":
    main()
