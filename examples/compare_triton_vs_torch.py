"""The kernels of block-sparse attention against plain torch: `block_sparse_attn`, and `hstu_attention_with_bsa` around
it.

python examples/compare_triton_vs_torch.py                                   # small, medium and large
python examples/compare_triton_vs_torch.py --config small --dtype fp32 --rtol 1e-4 --atol 1e-5

Needs the extra `tools` (typer). Where there is no GPU the kernels are interpreted, which takes some three minutes,
`small` alone ten seconds. Exit
status 0: all passed; 1: something failed. The check is tilewise.verify's, outputs alone: `tilewise verify bsa` does
much more, gradients included.
"""

from typing import Annotated, Any

import typer

from tilewise import interpreter

# Before anything imports triton, which reads then whether to interpret.
INTERPRETED = interpreter.use_where_no_gpu()

import torch  # noqa: E402

import tilewise  # noqa: E402
from tilewise.verify import compare_tensors, verify  # noqa: E402
from tilewise.verify.compare import Comparison  # noqa: E402
from tilewise.verify.result import CHOICE  # noqa: E402

OPERATORS = {"bsa": tilewise.block_sparse_attn, "hstu-bsa": tilewise.hstu_attention_with_bsa}
# What the tensors are called elsewhere.
NAMES = {"o": "output"}


class Recorded:
    """An operator's kernels, which remember what they were first called with and what they gave."""

    def __init__(self, operator: str) -> None:
        self._function = OPERATORS[operator]
        self.first: tuple[dict[str, Any], tuple[torch.Tensor, ...]] | None = None

    def __call__(self, **arguments: Any) -> tuple[torch.Tensor, ...]:
        results = self._function(**arguments, backend="triton")
        self.first = self.first or (arguments, results)
        return results


def statistics(comparison: Comparison) -> str:
    c = comparison
    return (
        f"max abs error {c.max_diff:.2e}  mean abs error {c.mean_diff:.2e}  mean relative error {c.mean_rel_diff:.2e}"
        f"  allowed {c.allowed:.2e}  {verdict(c.passed)}"
    )


def verdict(passed: bool) -> str:
    return "passed" if passed else "FAILED"


def compare_indices(actual: torch.Tensor, arguments: dict[str, Any], passed: bool) -> str:
    """The chosen blocks against the reference's own choice.

    Two blocks whose scores are equal within rounding may change places, so the verdict comes from verify, by score;
    these numbers are to look at.
    """
    with torch.no_grad():
        _, expected = tilewise.block_sparse_attn(**arguments, backend="reference")
    c = compare_tensors(actual, expected, verbose=False)
    differing = f"{int((actual != expected).sum())} of {expected.numel()} differ"
    return f"max abs error {c.max_diff:.2e}  mean abs error {c.mean_diff:.2e}  {differing}  by score: {verdict(passed)}"


def compare_case(operator: str, case: str, dtype: str, seed: int, rtol: float | None, atol: float | None) -> bool:
    """Compare the outputs of one case, and print each one's statistics; returns whether all passed."""
    recorded = Recorded(operator)
    report = verify(
        operator, recorded, configs=[case], dtypes=[dtype], seed=seed, gradients=False, rtol=rtol, atol=atol
    )
    (result,) = report.results
    print(f"\n{operator} {case} {dtype}, {result.seconds:.1f} s")
    if recorded.first is not None:
        arguments, results = recorded.first
        print(
            "  shapes: "
            + ", ".join(f"{name} {list(x.shape)}" for name, x in arguments.items() if isinstance(x, torch.Tensor))
        )
        if operator == "bsa":
            right = not any(finding.status == CHOICE for finding in result.findings)
            print(f"  {'block_indices':<14} {compare_indices(results[1], arguments, right)}")
    for comparison in result.comparisons:
        print(f"  {NAMES.get(comparison.name, comparison.name):<14} {statistics(comparison)}")
        if comparison.failure is not None:
            print(f"    {comparison.failure.status}: {comparison.failure.problem}")
    for finding in result.findings:
        print(f"  {finding.status}: {finding.message}")
    return report.passed


def main(
    config: Annotated[
        list[str] | None, typer.Option(help="A case of `tilewise verify --list`; may be given more than once.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "fp32",
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 42,
    rtol: Annotated[float | None, typer.Option(help="Judge by this in place of eager torch's error.")] = None,
    atol: Annotated[float | None, typer.Option(help="The same, absolute.")] = None,
) -> None:
    print("device: CPU, kernels interpreted" if INTERPRETED else f"device: {torch.cuda.get_device_name()}")
    cases = config or ["small", "medium", "large"]
    passed = [compare_case(operator, case, dtype, seed, rtol, atol) for operator in OPERATORS for case in cases]
    print(f"\n{'PASS' if all(passed) else 'FAIL'}: {sum(passed)} of {len(passed)} cases passed")
    raise typer.Exit(0 if all(passed) else 1)


if __name__ == "__main__":
    typer.run(main)
