"""Greedy decoding with a small transformer over a cache: prompts of different lengths, GQA, rotary.

python examples/generate.py             # each sequence has room for the longest
python examples/generate.py --paged     # pages are handed out as sequences grow

The weights are random. What it shows is that the tokens are those of the model without a cache.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import nn

from tilewise import flash_attention, flash_attention_with_kvcache
from tilewise.nn.rotary import rotate

LETTERS, DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 96, 256, 4, 8, 2, 32
PAGE = 16


@dataclass
class Cache:
    """Each layer's keys and values, dense `[B, room, KV_HEADS, HEAD_DIM]` or pools of pages
    `[pages, PAGE, KV_HEADS, HEAD_DIM]`; how long each sequence is, `[B]`; which pages it lies on, `[B, P]`.
    """

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    lengths: torch.Tensor
    table: torch.Tensor | None = None

    def of(self, b: int) -> "Cache":
        """One sequence's, to prefill it alone: views of the same memory. Pools of pages are everybody's."""
        if self.table is not None:
            return Cache(self.layers, self.lengths[b : b + 1], self.table[b : b + 1])
        return Cache([(k[b : b + 1], v[b : b + 1]) for k, v in self.layers], self.lengths[b : b + 1])


class Pages:
    """Hands out the pages of the pools as sequences grow. A sequence that ends would give its own back to `free`."""

    def __init__(self, table: torch.Tensor, pages: int) -> None:
        self.table, self.free = table, list(range(pages))
        self.held = [0] * len(table)

    def grow(self, b: int, tokens: int) -> None:
        while self.held[b] * PAGE < tokens:
            self.table[b, self.held[b]] = self.free.pop()
            self.held[b] += 1


class Block(nn.Module):
    """Attention, then an MLP, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.to_q = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.to_kv = nn.Linear(DIM, 2 * KV_HEADS * HEAD_DIM, bias=False)
        self.to_out = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, layer: int, cache: Cache | None) -> torch.Tensor:
        normed = self.norm(x)
        q = self.to_q(normed).unflatten(-1, (HEADS, HEAD_DIM))
        k, v = self.to_kv(normed).unflatten(-1, (2, KV_HEADS, HEAD_DIM)).unbind(-3)
        q, k = (rotate(part, positions, 10000.0) for part in (q, k))
        if cache is None:
            o = flash_attention(q, k, v, causal=True)
        else:
            # Writes k and v behind the tokens that are there, in place, and attends to all of them.
            k_cache, v_cache = cache.layers[layer]
            o = flash_attention_with_kvcache(
                q, k_cache, v_cache, k, v, cache_seqlens=cache.lengths, page_table=cache.table
            )
        x = x + self.to_out(o.flatten(-2))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """Tokens [B, n] -> logits of the next ones [B, n, LETTERS]; with a cache, of new tokens behind those in it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, LETTERS)
        for weight in self.parameters():
            if weight.dim() == 2:
                # Larger than torch's own start, by which tokens would hardly look at each other.
                nn.init.normal_(weight, std=0.1)

    def forward(self, tokens: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if cache is not None:
            positions = cache.lengths[:, None] + positions
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, positions, layer, cache)
        if cache is not None:
            # In place: a captured CUDA graph reads them from the same memory at its next replay.
            cache.lengths += tokens.shape[1]
        return self.head(self.norm(x))


def make_cache(lengths: list[int], paged: bool, device: str) -> tuple[Cache, Pages | None]:
    """An empty cache for sequences that will have so many tokens: dense, each gets the room of the longest."""
    batch, needed = len(lengths), [-(-length // PAGE) for length in lengths]
    shape = (sum(needed) if paged else batch, PAGE if paged else max(lengths), KV_HEADS, HEAD_DIM)
    layers = [(torch.empty(shape, device=device), torch.empty(shape, device=device)) for _ in range(LAYERS)]
    cache = Cache(layers, torch.zeros(batch, dtype=torch.int32, device=device))
    if not paged:
        return cache, None
    cache.table = torch.full((batch, max(needed)), -1, dtype=torch.int32, device=device)
    return cache, Pages(cache.table, sum(needed))


@torch.no_grad()
def generate(
    model: Transformer, prompts: list[torch.Tensor], count: int, cache: Cache, pages: Pages | None
) -> torch.Tensor:
    """`count` tokens behind each prompt, [B, count]: prompts one by one, then a token of all sequences at a time."""
    first = []
    for b, prompt in enumerate(prompts):
        if pages is not None:
            pages.grow(b, len(prompt))
        first.append(model(prompt[None], cache.of(b))[0, -1].argmax())
    tokens = [torch.stack(first)]
    for step in range(1, count):
        if pages is not None:
            for b, prompt in enumerate(prompts):
                pages.grow(b, len(prompt) + step)
        tokens.append(model(tokens[-1][:, None], cache)[:, -1].argmax(-1))
    return torch.stack(tokens, 1)


@torch.no_grad()
def recompute(model: Transformer, prompt: torch.Tensor, count: int) -> torch.Tensor:
    """The same for one prompt, without a cache: all of the text again for each token."""
    text = prompt
    for _ in range(count):
        text = torch.cat([text, model(text[None])[0, -1:].argmax(-1)])
    return text[len(prompt) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paged", action="store_true", help="caches in pages")
    parser.add_argument("--count", type=int, default=40, help="tokens to generate")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Transformer().to(options.device)
    prompts = [torch.randint(LETTERS, (length,), device=options.device) for length in (5, 37, 18)]
    cache, pages = make_cache([len(prompt) + options.count for prompt in prompts], options.paged, options.device)
    found = generate(model, prompts, options.count, cache, pages)
    for prompt, tokens in zip(prompts, found, strict=True):
        print("".join(chr(32 + token) for token in tokens.tolist()))
        if not torch.equal(tokens, recompute(model, prompt, options.count)):
            raise SystemExit("without a cache the tokens differ")
    print("the same tokens as without a cache")


if __name__ == "__main__":
    main()
