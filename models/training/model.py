"""A compact Llama in plain torch, laid out so that its state dict is Hugging Face's.

The parameter names (`model.layers.0.self_attn.q_proj.weight`, ...) and the rotary layout (first half against second
half) are those of `transformers.LlamaForCausalLM`, so a checkpoint needs no conversion; the engine test compares the
logits of both. There is no padding mask: a batch holds documents that all start at position 0 and are padded at the
right, where causal attention cannot look.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Shape(NamedTuple):
    """Everything that tells one of our models from another."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_width: int
    head_size: int = 32
    vocabulary: int = 704
    positions: int = 4096
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


# Head size 32 is the smallest that vLLM's CPU attention takes; 64 for the large one, as real models have.
SHAPES = {
    "nano": Shape(width=128, layers=3, heads=4, kv_heads=2, mlp_width=256),
    "micro": Shape(width=192, layers=5, heads=6, kv_heads=2, mlp_width=512),
    "mini": Shape(width=288, layers=8, heads=9, kv_heads=3, mlp_width=832),
    "load-100m": Shape(width=768, layers=14, heads=12, kv_heads=12, mlp_width=2048, head_size=64),
}


class Attention(nn.Module):
    """Grouped-query causal attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_size, shape.width, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Mixes along the sequence; x is (documents, tokens, width)."""
        documents, tokens, _ = x.shape
        size, groups = self.shape.head_size, self.shape.heads // self.shape.kv_heads
        q = rotate(self.q_proj(x).view(documents, tokens, -1, size), rope).transpose(1, 2)
        k = rotate(self.k_proj(x).view(documents, tokens, -1, size), rope).transpose(1, 2)
        v = self.v_proj(x).view(documents, tokens, -1, size).transpose(1, 2)
        mixed = attend(q, k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1))
        return self.o_proj(mixed.transpose(1, 2).reshape(documents, tokens, -1))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over (documents, heads, tokens, head size).

    On a CPU torch's fused kernel is slow to differentiate: spelled out, a training step of the 8 M model at 128 tokens
    takes 0.6 of the time. Above 512 tokens the fused kernel wins, as it skips what lies ahead.
    """
    tokens = q.shape[2]
    if q.is_cuda or tokens > 512:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    ahead = torch.full((tokens, tokens), float("-inf"), dtype=q.dtype).triu(1)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + ahead
    return torch.softmax(scores.float(), dim=-1).to(v.dtype) @ v


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down_proj = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps each token by itself."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Norm(nn.Module):
    """RMSNorm with a weight."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.width))
        self.eps = shape.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """Scales each token to unit root mean square, in the precision of x."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Adds what attention and the MLP find to the residual stream."""
        x = x + self.self_attn(self.input_layernorm(x), rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Embedding, layers and last norm: what Hugging Face calls `model`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape)


class Llama(nn.Module):
    """The causal language model; the output layer is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Last hidden states of int64 tokens (documents, tokens), after the last norm."""
        x = self.model.embed_tokens(tokens)
        if torch.is_autocast_enabled(tokens.device.type):
            x = x.to(torch.get_autocast_dtype(tokens.device.type))
        rope = rope_tables(self.shape, tokens.shape[1], tokens.device, x.dtype)
        for layer in self.model.layers:
            x = layer(x, rope)
        return self.model.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (documents, tokens, vocabulary)."""
        return F.linear(self.hidden(tokens), self.model.embed_tokens.weight)


def rope_tables(shape: Shape, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (tokens, 1, half a head)."""
    exponents = torch.arange(0, shape.head_size, 2, device=device, dtype=torch.float32) / shape.head_size
    angles = torch.outer(torch.arange(tokens, device=device, dtype=torch.float32), shape.rope_theta**-exponents)
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each head of x (documents, tokens, heads, head size) by its position, first half against second."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def draw_weights(model: Llama, seed: int) -> None:
    """Draws all matrices from a seed: deviation 1/sqrt(inputs), less where a layer writes to the residual stream."""
    generator = torch.Generator().manual_seed(seed)
    depth = math.sqrt(2 * model.shape.layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        deviation = 0.02 if "embed" in name else 1 / math.sqrt(parameter.shape[1])
        if "o_proj" in name or "down_proj" in name:
            deviation /= depth
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)


def parameter_count(model: nn.Module) -> int:
    """Number of weights, the tied embedding once."""
    return sum(p.numel() for p in model.parameters())
