"""Times a training step of a Llama of 1.2 billion parameters in Hugging Face transformers, forward, loss, backward and
AdamW in bf16, with each attn_implementation, in one run.

python benchmarks/training_step.py --json benchmarks/results/training-step-h200.json

`sdpa cudnn` is transformers' sdpa with torch held to cuDNN, `sdpa` is what torch chooses. The logits of the loss are
made in pieces, as whole ones would take more memory than the model.
"""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch
from harness import Run, medians, where_to_save
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tilewise.bench.timing import Clock

DEVICE = "cuda"
# Those of Llama 3.2 1B.
SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
# (tokens, whether the layers' activations are computed again in the backward)
CASES = ((8192, False), (8192, True), (32768, False))
OURS, CUDNN = "tilewise", "sdpa cudnn"
NAMES = (OURS, "sdpa", CUDNN, "eager")
# Tokens whose logits exist at a time.
PIECE = 4096


class Training:
    """A model with random weights, its optimizer and a sequence of random tokens."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        with torch.device(DEVICE):
            self._model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        self._ids = torch.empty(1, 0, dtype=torch.long)

    def prepare(self, tokens: int, again: bool) -> None:
        """What the steps from here on train on, and how."""
        self._ids = torch.randint(SHAPE["vocab_size"], (1, tokens), device=DEVICE)
        if again:
            self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self._model.gradient_checkpointing_disable()

    def step(self, name: str) -> None:
        """A whole one."""
        self._model.set_attn_implementation(name.split()[0])
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if name == CUDNN else contextlib.nullcontext():
            self._loss().backward()
        self._optimizer.step()
        self.forget()

    def forget(self) -> None:
        """The gradients."""
        self._optimizer.zero_grad()

    def _loss(self) -> torch.Tensor:
        hidden = self._model.model(self._ids, use_cache=False).last_hidden_state[0, :-1]
        wanted = self._ids[0, 1:]
        pieces = [
            checkpoint(self._loss_of_piece, *piece, use_reentrant=False)
            for piece in zip(hidden.split(PIECE), wanted.split(PIECE), strict=True)
        ]
        return torch.stack(pieces).sum() / len(wanted)

    def _loss_of_piece(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self._model.lm_head(hidden).float(), wanted, reduction="sum")


def peak_of(training: Training, name: str) -> int | str:
    """Mebibytes that are in use at most while a step runs, or why it does not."""
    why = ""
    torch.cuda.reset_peak_memory_stats()
    try:
        training.step(name)
    except torch.OutOfMemoryError:
        why = "out of memory"
    except RuntimeError as error:
        # torch's backends do not take every shape.
        if name != CUDNN:
            raise
        why = str(error).splitlines()[0]
    if why:
        training.forget()
        gc.collect()
    peak = torch.cuda.max_memory_allocated() >> 20
    torch.cuda.empty_cache()
    return why or peak


def case_name(tokens: int, again: bool) -> str:
    """What a row is called."""
    return f"{tokens} tokens{', activations computed again' if again else ''}"


def measure(clock: Clock, training: Training, tokens: int, again: bool) -> dict[str, object]:
    """A row: each implementation that can run."""
    training.prepare(tokens, again)
    peaks = {name: peak_of(training, name) for name in NAMES}
    able = [name for name in NAMES if isinstance(peaks[name], int)]
    calls: dict[str, Callable[[], object]] = {name: lambda name=name: training.step(name) for name in able}  # type: ignore[misc]
    milliseconds = medians(clock, calls)
    return {
        "case": case_name(tokens, again),
        "tokens": tokens,
        "milliseconds": milliseconds,
        "tokens_per_second": {name: round(1e3 * tokens / value) for name, value in milliseconds.items()},
        "mebibytes": {name: peaks[name] for name in able},
        "cannot_run": {name: why for name, why in peaks.items() if name not in able},
    }


def main() -> None:
    """Every case."""
    path = where_to_save(__doc__)
    from tilewise.integrations.transformers import register

    register()
    from transformers import __version__

    run = Run("training_step", path, environment={"transformers": __version__}, dtype="bf16", shape=SHAPE)
    run.begin("the model")
    training, clock = Training(), Clock(torch.device(DEVICE))
    # The first step makes AdamW's state too.
    training.prepare(*CASES[0])
    training.step(OURS)
    for tokens, again in CASES:
        run.begin(case_name(tokens, again))
        run.add(measure(clock, training, tokens, again))
    run.print_table()


if __name__ == "__main__":
    main()
