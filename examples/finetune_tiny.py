"""A model of Hugging Face transformers trained with attn_implementation="tilewise", and the same one with sdpa next to
it: it learns to write words backwards, byte by byte.

python examples/finetune_tiny.py                     # less than a minute of one CPU core
python examples/finetune_tiny.py --device cuda

Needs the extra `transformers`. Weights are random, so that nothing is downloaded; with yours, `train` begins with
from_pretrained(..., attn_implementation="tilewise"). Batches are padded, on the right in training and on the left for
generate().
"""

import argparse
import re
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tilewise.integrations.transformers import register

TEXT = Path(__file__).parent / "data" / "alice.txt"
PAD, END = 0, ord("\n")
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": END,
}
NAMES = ("tilewise", "sdpa")
BATCH, SHOWN = 32, 50


def words(text: str) -> list[str]:
    """Of three to six letters, each once."""
    return sorted(set(re.findall(r"\b[a-z]{3,6}\b", text)))


def padded(lines: list[bytes], *, left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, T], and which of them exist."""
    longest = max(map(len, lines))
    rows = [line.rjust(longest, b"\0") if left else line.ljust(longest, b"\0") for line in lines]
    ids = torch.tensor([list(row) for row in rows])
    return ids, ids != PAD


def lesson(batch: list[str]) -> dict[str, torch.Tensor]:
    """`word>drow` and a line's end; the loss is of what comes behind the sign."""
    ids, exists = padded([f"{word}>{word[::-1]}\n".encode() for word in batch])
    answer = exists & ((ids == ord(">")).cumsum(1) > 0) & (ids != ord(">"))
    return {"input_ids": ids, "attention_mask": exists.long(), "labels": ids.where(answer, -100)}


def train(
    implementation: str, seen: list[str], steps: int, seed: int, device: str
) -> tuple[LlamaForCausalLM, list[float]]:
    """A model of its own, and its losses: the same weights and batches whatever the implementation."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation=implementation)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1, pct_start=0.1)
    losses = []
    for _ in range(steps):
        batch = [seen[i] for i in torch.randint(len(seen), (BATCH,)).tolist()]
        loss = model(**{name: x.to(device) for name, x in lesson(batch).items()}, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return model.eval(), losses


@torch.no_grad()
def answers(model: LlamaForCausalLM, asked: list[str], device: str) -> list[str]:
    """What the model writes behind each word."""
    ids, exists = padded([f"{word}>".encode() for word in asked], left=True)
    written = model.generate(ids.to(device), attention_mask=exists.long().to(device), max_new_tokens=8, do_sample=False)
    return [bytes(row).decode().partition("\n")[0].strip("\0") for row in written[:, ids.shape[1] :].tolist()]


def main() -> None:
    """Both models learn, then write words that they have not seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    register()
    everything = words(TEXT.read_text(encoding="ascii"))
    held_out = everything[::20]
    seen = [word for word in everything if word not in held_out]
    models, losses = [], []
    for name in NAMES:
        model, found = train(name, seen, options.steps, options.seed, options.device)
        models.append(model)
        losses.append(found)

    print(f"{'loss at step':>13}{''.join(f'{name:>10}' for name in NAMES)}")
    for step in sorted({*range(0, options.steps, SHOWN), options.steps - 1}):
        print(f"{step:>13}{''.join(f'{one[step]:10.4f}' for one in losses)}")
    print(f"of {len(held_out)} words that were held out, written backwards without a mistake:")
    for name, model in zip(NAMES, models, strict=True):
        written = answers(model, held_out, options.device)
        right = sum(answer == word[::-1] for word, answer in zip(held_out, written, strict=True))
        print(f"{name:>13}{right:10}   {', '.join(map('>'.join, zip(held_out[:4], written, strict=False)))}")


if __name__ == "__main__":
    # So small are the tensors that threads would mostly wait for each other.
    torch.set_num_threads(1)
    main()
