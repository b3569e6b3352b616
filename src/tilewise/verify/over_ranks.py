"""`tilewise verify OP --parallel N`: an operator's cases over the ranks of a ContextPlan.

The truth is one process's. Which tokens a rank has is computed here, and not by the plan.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from tilewise import workbench
from tilewise.verify.attempt import same_bits
from tilewise.verify.implementation import RankError
from tilewise.verify.rank_suite import OverRanks
from tilewise.verify.ranks import Message, Ranks
from tilewise.verify.result import NOTE, PLAN, Check, Finding, Result
from tilewise.verify.run import Runner
from tilewise.verify.suite import Mutant, Tensors
from tilewise.verify.time_limits import Budget
from tilewise.workbench.operator import UsageError

Tensor = torch.Tensor
# The plans that cases take in turn. In a scattered one STRIPE tokens stand side by side.
BALANCES = ("head_tail", "contiguous", "scattered")
STRIPE = 5


def run_over_ranks(checks: Sequence[Check], budget: Budget, mutant: Mutant | None = None) -> Iterator[Result]:
    """Their results, one after the other, over the same ranks."""
    runners: dict[tuple[str, str], tuple[Runner, _Function]] = {}
    ranks = Ranks(checks[0].implementation.ranks, mutant)
    try:
        try:
            ranks.start()
        except RankError as error:
            raise UsageError(f"--parallel: {error}, and did not start; see its own output") from None
        for check in checks:
            key = check.operator, check.implementation.name
            if key not in runners:
                operator = workbench.find(check.operator)
                function = _Function(ranks, *key, operator.load("over_ranks"))
                runners[key] = Runner(operator, function), function
            runner, function = runners[key]
            result = budget.skip(check) or runner.run(check)
            if not (result.passed or result.skipped):
                note = Finding(PLAN, function.plan, NOTE)
                result = replace(result, findings=(*result.findings, note))
            yield result
    finally:
        ranks.stop()


def plans(methods: Sequence[str]) -> list[tuple[str, str]]:
    """Methods and balances, in an order in which neighbours differ in both."""
    count = len(methods) * len(BALANCES)
    return [(methods[i % len(methods)], BALANCES[i % len(BALANCES)]) for i in range(count)]


def owners(lengths: Sequence[int], world: int, balance: str) -> Tensor:
    """Each token's rank, as ContextPlan promises it."""
    found = [torch.empty(0, dtype=torch.int64)]
    for length in lengths:
        token = torch.arange(length)
        if balance == "scattered":
            found.append(token // STRIPE % world)
            continue
        pieces = 2 * world if balance == "head_tail" else world
        starts = torch.tensor([i * length // pieces for i in range(pieces)])
        piece = torch.searchsorted(starts, token, right=True) - 1
        found.append(torch.minimum(piece, pieces - 1 - piece) if balance == "head_tail" else piece)
    return torch.cat(found)


class _Function:
    """An operator's public function over ranks, called with whole tensors."""

    def __init__(self, ranks: Ranks, operator: str, backend: str, declared: OverRanks) -> None:
        self._ranks, self._operator, self._backend, self._declared = ranks, operator, backend, declared
        # The last call's, in words.
        self.plan = ""

    def __call__(self, **arguments: Any) -> tuple[Tensor, ...]:
        tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
        options = {name: x for name, x in arguments.items() if name not in tensors}
        offsets = [tensors.pop(name) for name in self._declared.offsets if name in tensors]
        names = list(tensors)
        returned: tuple[Tensor, ...] = _OverRanks.apply(self, names, offsets, options, *tensors.values())
        return returned

    def forward(self, tensors: Tensors, offsets: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
        """The whole outputs."""
        q = tensors["q"]
        lengths = offsets[0].diff().tolist() if offsets else [q.shape[1]]
        method, balance = self._plan(tensors, options)
        self.plan = f"method {method}, balance {balance}"
        owner = owners(lengths, self._ranks.world, balance)
        position = torch.cat([torch.arange(length) for length in lengths])
        plan: dict[str, Any] = {"cu_seqlens": offsets[0]} if offsets else {"seq_len": q.shape[1]}
        plan |= {"method": method, "balance": owner if balance == "scattered" else balance}
        common = {
            "operator": self._operator,
            "plan": plan,
            "tensors": {name: x.detach().contiguous() for name, x in tensors.items()},
            "shared": [name for name in tensors if name in self._declared.shared],
            "strided": [name for name, x in tensors.items() if not x.is_contiguous()],
            "wanted": [name for name, x in tensors.items() if x.requires_grad],
            "options": options | {"backend": self._backend},
        }
        mine = [(owner == rank).nonzero().flatten() for rank in range(self._ranks.world)]
        outputs = self._ranks.ask([("forward", common | {"expected": (tokens, position[tokens])}) for tokens in mine])
        for rank, others in enumerate(outputs):
            if not all(map(same_bits, others, outputs[0])):
                raise RankError(f"unshard gives rank {rank} other results than rank 0")
        return outputs[0]

    def backward(self, gradients: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
        """Those of the whole inputs: the sums of the ranks' partial ones."""
        message: Message = "backward", {"gradients": list(gradients)}
        parts = self._ranks.ask([message] * self._ranks.world)
        return {name: _sum([part[name] for part in parts]) for name in parts[0]}

    def _plan(self, tensors: Tensors, options: dict[str, Any]) -> tuple[str, str]:
        """By the case and its dtype, but not by the order of its sequences: each has one, dtypes different ones."""
        shapes = [(name, list(x.shape)) for name, x in sorted(tensors.items())]
        dtypes = torch.float32, torch.float16, torch.bfloat16
        number = zlib.crc32(repr((shapes, sorted(options.items()))).encode()) + dtypes.index(tensors["q"].dtype)
        found = plans(self._declared.methods)
        return found[number % len(found)]


def _sum(parts: list[Tensor | None]) -> Tensor | None:
    there = [x for x in parts if x is not None]
    if not there:
        return None
    return torch.stack([x.float() for x in there]).sum(0).to(there[0].dtype)


class _OverRanks(torch.autograd.Function):
    """The function's forward and backward on all ranks."""

    @staticmethod
    def forward(
        ctx: Any, function: _Function, names: list[str], offsets: list[Tensor], options: dict[str, Any], *given: Tensor
    ) -> tuple[Tensor, ...]:
        """Whole outputs."""
        ctx.function, ctx.names = function, names
        outputs = function.forward(dict(zip(names, given, strict=True)), offsets, options)
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Those of the whole inputs."""
        floating = [x if x is not None and x.is_floating_point() else None for x in gradients]
        found = ctx.function.backward(floating)
        return None, None, None, None, *(found.get(name) for name in ctx.names)
