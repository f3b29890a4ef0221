"""Decodes many prompts at once with a key-value cache: what evaluation needs and no more.

Prompts are padded at the right to one length P. The token generated at step t of every row lies in cache slot P + t,
though its position (for the rotary embedding) follows its own prompt; the mask hides the padding between the two.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.training.model import Attention, Llama, rope_tables, rotate

ROWS_MAX = 256
# The cache grows by so many slots at a time: most outputs are far shorter than their limit.
SLOTS_AT_A_TIME = 128
# Finished rows are dropped when this share of the rows is finished; dropping copies the cache.
DROP_SHARE = 0.2


class Cache:
    """Keys and values per layer, (rows, key-value heads, slots, head size), and which slots each row may read."""

    def __init__(self, model: Llama, lengths: Tensor, prompt_slots: int) -> None:
        shape, rows = model.shape, len(lengths)
        dtype, device = model.model.embed_tokens.weight.dtype, lengths.device
        size = (shape.layers, rows, shape.kv_heads, prompt_slots, shape.head_size)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self.readable = torch.arange(prompt_slots, device=device)[None, :] < lengths[:, None]
        self.used = 0

    def take(self, count: int) -> None:
        """Makes the next `count` slots the ones in use."""
        self.used += count
        if self.used > self.readable.shape[1]:
            more = SLOTS_AT_A_TIME
            self.keys, self.values = F.pad(self.keys, (0, 0, 0, more)), F.pad(self.values, (0, 0, 0, more))
            self.readable = F.pad(self.readable, (0, more))

    def keep(self, rows: Tensor) -> None:
        """Drops all other rows."""
        self.keys, self.values, self.readable = self.keys[:, rows], self.values[:, rows], self.readable[rows]


class Sampling(NamedTuple):
    """Choice of tokens: greedy at temperature 0, else from the whole distribution; `eos` ends an output."""

    temperature: float
    eos: int
    generator: torch.Generator


class Request(NamedTuple):
    """A prompt to continue.

    Where there is one right output, decoding stops after the first token that differs from it: no need to see more.
    """

    prompt: list[int]
    tokens_max: int
    expected: list[int] | None = None

    def ended(self, output: list[int]) -> bool:
        """Whether an output is long enough, or wrong."""
        wrong = self.expected is not None and output != self.expected[: len(output)]
        return wrong or len(output) >= self.tokens_max


@torch.inference_mode()
def generate(model: Llama, requests: list[Request], sampling: Sampling) -> list[list[int]]:
    """Continues each prompt to the end of sequence, which is not part of the result, or to the request's own end."""
    order = sorted(range(len(requests)), key=lambda index: requests[index].tokens_max)
    outputs: list[list[int]] = [[] for _ in requests]
    for start in range(0, len(order), ROWS_MAX):
        chosen = order[start : start + ROWS_MAX]
        batch = _generate_batch(model, [requests[index] for index in chosen], sampling)
        for index, output in zip(chosen, batch, strict=True):
            outputs[index] = output
    return outputs


def _generate_batch(model: Llama, requests: list[Request], sampling: Sampling) -> list[list[int]]:
    device = model.model.embed_tokens.weight.device
    outputs: list[list[int]] = [[] for _ in requests]
    ended = [False] * len(requests)
    rows = list(range(len(requests)))  # the request of each row of the cache
    lengths = torch.tensor([len(request.prompt) for request in requests], device=device)
    width = int(lengths.max())
    tokens = torch.tensor([r.prompt + [0] * (width - len(r.prompt)) for r in requests], device=device)
    cache = Cache(model, lengths, width)
    longest = width + max(request.tokens_max for request in requests)
    rope = rope_tables(model.shape, longest, device, cache.keys.dtype)
    hidden = _forward(model, tokens, torch.arange(width, device=device).expand(len(rows), width), rope, cache)
    last = hidden[torch.arange(len(rows), device=device), lengths - 1]
    while True:
        drawn = _pick(F.linear(last, model.model.embed_tokens.weight).float(), sampling)
        for row, token in zip(rows, drawn.tolist(), strict=True):
            if not ended[row] and token != sampling.eos:
                outputs[row].append(token)
            ended[row] = ended[row] or token == sampling.eos or requests[row].ended(outputs[row])
        if all(ended):
            return outputs
        alive = [index for index, row in enumerate(rows) if not ended[row]]
        if len(alive) <= (1 - DROP_SHARE) * len(rows):
            kept = torch.tensor(alive, dtype=torch.int64, device=device)
            cache.keep(kept)
            drawn, lengths, rows = drawn[kept], lengths[kept], [rows[index] for index in alive]
        last = _forward(model, drawn[:, None], lengths[:, None], rope, cache)[:, -1]
        lengths = lengths + 1


def _pick(logits: Tensor, sampling: Sampling) -> Tensor:
    if sampling.temperature == 0:
        return logits.argmax(-1)
    chances = torch.softmax(logits / sampling.temperature, dim=-1)
    return torch.multinomial(chances, 1, generator=sampling.generator)[:, 0]


def _forward(model: Llama, tokens: Tensor, positions: Tensor, rope: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
    """Last hidden states of new tokens (rows, count), written to the cache at its next slots."""
    count, first = tokens.shape[1], cache.used
    cache.take(count)
    if count == 1:
        cache.readable[:, first] = True
        mask = cache.readable[:, None, : cache.used]
    else:
        ahead = torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril()
        mask = ahead[None] & cache.readable[:, None, :count]
    turned = (rope[0][positions], rope[1][positions])
    x = model.model.embed_tokens(tokens)
    for index, layer in enumerate(model.model.layers):
        x = x + _attend(layer.self_attn, layer.input_layernorm(x), turned, cache, index, mask)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.model.norm(x)


def _attend(
    attention: Attention, x: Tensor, rope: tuple[Tensor, Tensor], cache: Cache, layer: int, mask: Tensor
) -> Tensor:
    rows, count, _ = x.shape
    size, kv_heads = attention.shape.head_size, attention.shape.kv_heads
    slots = slice(cache.used - count, cache.used)
    cache.keys[layer, :, :, slots] = rotate(attention.k_proj(x).view(rows, count, kv_heads, size), rope).transpose(1, 2)
    cache.values[layer, :, :, slots] = attention.v_proj(x).view(rows, count, kv_heads, size).transpose(1, 2)
    q = rotate(attention.q_proj(x).view(rows, count, -1, size), rope)
    # Heads that share a key-value head become more queries of it: nothing is copied per head.
    q = q.view(rows, count, kv_heads, -1, size).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, size)
    scores = q @ cache.keys[layer, :, :, : cache.used].transpose(-1, -2) * size**-0.5
    groups = q.shape[2] // count
    hidden = ~mask[:, None].repeat(1, 1, groups, 1)
    weights = torch.softmax(scores.float().masked_fill(hidden, float("-inf")), dim=-1).to(x.dtype)
    mixed = weights @ cache.values[layer, :, :, : cache.used]
    mixed = mixed.view(rows, kv_heads, groups, count, size).permute(0, 3, 1, 2, 4).reshape(rows, count, -1)
    return attention.o_proj(mixed)
