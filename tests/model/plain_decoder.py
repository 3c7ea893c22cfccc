"""Decoders in plain torch, written from the papers, sharing no code with megascale: what options are held against.

With the options of `LLAMA` this is Llama (Touvron et al. 2023), with the parameter names and shapes of the published
checkpoints in Hugging Face's format; with those of `POST_NORM` the original transformer's order with ReLU (Vaswani et
al. 2017) under the same names. Every projection is a matrix of its own, rotation is multiplication of complex numbers,
keys and values are repeated for each head, and the softmax is spelled out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Options:
    num_layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocab: int
    positions: int
    rotary_base: float | None = None  # None: learned positions
    rms: bool = False
    epsilon: float = 1e-5
    post: bool = False
    activation: str = "gelu"
    bias: bool = True
    tied: bool = True


class PlainNorm(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.rms, self.epsilon = options.rms, options.epsilon
        self.weight = nn.Parameter(torch.empty(options.hidden))
        self.bias = None if options.rms else nn.Parameter(torch.empty(options.hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rms:
            return self.weight * (x / (x.pow(2).mean(-1, keepdim=True) + self.epsilon).sqrt())
        centred = x - x.mean(-1, keepdim=True)
        return self.weight * centred / (centred.pow(2).mean(-1, keepdim=True) + self.epsilon).sqrt() + self.bias


def rotate(x: torch.Tensor, base: float) -> torch.Tensor:
    """Multiply feature pairs (i, i + d/2), read as complex numbers, by exp(i p base^(-2i/d)). x [b, a, s, d]."""
    *_, length, head = x.shape
    numbers = torch.complex(x[..., : head // 2], x[..., head // 2 :])
    speeds = torch.tensor([base ** (-2.0 * i / head) for i in range(head // 2)], dtype=torch.float64)
    turns = torch.stack([torch.polar(torch.ones_like(speeds), p * speeds) for p in range(length)])
    turned = numbers * turns
    return torch.cat([turned.real, turned.imag], dim=-1)


class PlainAttention(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        head = options.hidden // options.heads
        self.q_proj = nn.Linear(options.hidden, options.heads * head, bias=options.bias)
        self.k_proj = nn.Linear(options.hidden, options.groups * head, bias=options.bias)
        self.v_proj = nn.Linear(options.hidden, options.groups * head, bias=options.bias)
        self.o_proj = nn.Linear(options.heads * head, options.hidden, bias=options.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        o = self.options
        b, s, _ = x.shape
        query = self.q_proj(x).view(b, s, o.heads, -1).transpose(1, 2)
        key, value = (
            torch.stack([heads[:, :, k * o.groups // o.heads] for k in range(o.heads)], dim=1)
            for heads in (self.k_proj(x).view(b, s, o.groups, -1), self.v_proj(x).view(b, s, o.groups, -1))
        )
        if o.rotary_base is not None:
            query, key = rotate(query, o.rotary_base), rotate(key, o.rotary_base)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        future = torch.ones(s, s, dtype=torch.bool).triu(diagonal=1)
        exponentials = scores.masked_fill(future, float("-inf")).exp()
        weights = exponentials / exponentials.sum(-1, keepdim=True)
        return self.o_proj((weights @ value).transpose(1, 2).reshape(b, s, -1))


class PlainMLP(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.activation = options.activation
        if options.activation == "swiglu":
            self.gate_proj = nn.Linear(options.hidden, options.ffn, bias=options.bias)
        self.up_proj = nn.Linear(options.hidden, options.ffn, bias=options.bias)
        self.down_proj = nn.Linear(options.ffn, options.hidden, bias=options.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.up_proj(x)
        if self.activation == "swiglu":
            gate = self.gate_proj(x)
            return self.down_proj(gate / (1 + torch.exp(-gate)) * u)
        if self.activation == "relu":
            return self.down_proj(u * (u > 0))
        return self.down_proj(0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))))


class PlainLayer(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.post = options.post
        self.input_layernorm = PlainNorm(options)
        self.self_attn = PlainAttention(options)
        self.post_attention_layernorm = PlainNorm(options)
        self.mlp = PlainMLP(options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.post:
            x = self.input_layernorm(x + self.self_attn(x))
            return self.post_attention_layernorm(x + self.mlp(x))
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainDecoder(nn.Module):
    """tokens [b, s] -> logits [b, s, V]; without dropout."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(options.vocab, options.hidden)
        if options.rotary_base is None:
            self.embed_positions = nn.Embedding(options.positions, options.hidden)
        self.layers = nn.ModuleList(PlainLayer(options) for _ in range(options.num_layers))
        if not options.post:
            self.norm = PlainNorm(options)
        if not options.tied:
            self.lm_head = nn.Linear(options.hidden, options.vocab, bias=False)
        self.options = options

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        if self.options.rotary_base is None:
            x = x + self.embed_positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        x = x if self.options.post else self.norm(x)
        return x @ self.embed_tokens.weight.t() if self.options.tied else self.lm_head(x)


_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.output": "self_attn.o_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_OTHER_NAMES = {
    "word_embedding": "embed_tokens",
    "position_embedding": "embed_positions",
    "final_norm": "norm",
    "head": "lm_head",
}


def to_plain(name: str, tensor: torch.Tensor, options: Options) -> dict[str, torch.Tensor]:
    """Return one of our full tensors (a weight, a gradient) as the plain model's, by their names there."""
    path, _, kind = name.rpartition(".")
    if not path.startswith("blocks."):
        padded = path in ("word_embedding", "head")
        return {f"{_OTHER_NAMES[path]}.{kind}": tensor[: options.vocab] if padded else tensor}
    _, index, part = path.split(".", 2)
    layer = f"layers.{index}"
    if part == "attention.qkv":
        # [groups, queries of a group + key + value, head dim, ..]
        head, queries = options.hidden // options.heads, options.heads // options.groups
        groups = tensor.unflatten(0, (options.groups, queries + 2, head))
        pieces = {"q": groups[:, :queries], "k": groups[:, queries], "v": groups[:, queries + 1]}
        return {
            f"{layer}.self_attn.{letter}_proj.{kind}": piece.reshape(-1, *tensor.shape[1:])
            for letter, piece in pieces.items()
        }
    if part == "mlp.up" and options.activation == "swiglu":
        return {f"{layer}.mlp.gate_proj.{kind}": tensor[0], f"{layer}.mlp.up_proj.{kind}": tensor[1]}
    return {f"{layer}.{_LAYER_NAMES[part]}.{kind}": tensor}


def plain_decoder(weights: dict[str, torch.Tensor], options: Options) -> PlainDecoder:
    """Return the plain model that has our full weights (all of them, and no others)."""
    model = PlainDecoder(options).double()
    model.load_state_dict(
        {k: v for name, weight in weights.items() for k, v in to_plain(name, weight, options).items()}
    )
    return model
