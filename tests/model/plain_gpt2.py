"""GPT-2 in plain torch, written from its description and sharing no code with megascale: what ours is held against.

Parameters have the names and shapes of the published GPT-2 checkpoints: `Conv1D` weights are [inputs, outputs], and the
columns of `c_attn` are all queries, then all keys, then all values.
"""

from __future__ import annotations

import math

import torch
from torch import nn


class Conv1D(nn.Module):
    """y = x W + c with W [inputs, outputs]."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_inputs, num_outputs))
        self.bias = nn.Parameter(torch.empty(num_outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class PlainAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.c_attn = Conv1D(hidden_size, 3 * hidden_size)
        self.c_proj = Conv1D(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        query, key, value = (
            part.view(batch, sequence, self.num_heads, -1).transpose(1, 2)
            for part in self.c_attn(x).split(hidden, dim=-1)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(hidden // self.num_heads)
        future = torch.ones(sequence, sequence, dtype=torch.bool).triu(diagonal=1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return self.c_proj((weights @ value).transpose(1, 2).reshape(batch, sequence, hidden))


class PlainMLP(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.c_fc = Conv1D(hidden_size, 4 * hidden_size)
        self.c_proj = Conv1D(4 * hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.c_fc(x)
        return self.c_proj(0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))))


class PlainBlock(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden_size, eps=1e-5)
        self.attn = PlainAttention(hidden_size, num_heads)
        self.ln_2 = nn.LayerNorm(hidden_size, eps=1e-5)
        self.mlp = PlainMLP(hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class PlainGPT2(nn.Module):
    """tokens [b, s] -> logits [b, s, V]; without dropout."""

    def __init__(self, vocab_size: int, num_positions: int, hidden_size: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, hidden_size)
        self.wpe = nn.Embedding(num_positions, hidden_size)
        self.h = nn.ModuleList(PlainBlock(hidden_size, num_heads) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(hidden_size, eps=1e-5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.t()


_LAYER_NAMES = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_OTHER_NAMES = {"word_embedding": "wte", "position_embedding": "wpe", "final_norm": "ln_f"}


def plain_name(name: str) -> str:
    """Return GPT-2's name of one of our parameters."""
    path, _, kind = name.rpartition(".")
    if path.startswith("blocks."):
        _, index, rest = path.split(".", 2)
        return f"h.{index}.{_LAYER_NAMES[rest]}.{kind}"
    return f"{_OTHER_NAMES[path]}.{kind}"


def to_plain(name: str, tensor: torch.Tensor, num_heads: int, vocab_size: int) -> torch.Tensor:
    """Return one of our full tensors (a weight, a gradient) in GPT-2's layout."""
    if name == "word_embedding.weight":
        return tensor[:vocab_size]
    if ".qkv." in name:
        # [heads, 3, head dim] -> [3, heads, head dim]
        tensor = tensor.unflatten(0, (num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    is_linear = any(part in name for part in (".qkv.", ".output.", ".up.", ".down."))
    return tensor.t() if is_linear and name.endswith("weight") else tensor


def plain_gpt2(weights: dict[str, torch.Tensor], num_heads: int, vocab_size: int) -> PlainGPT2:
    """Return the plain model that has our full weights (all of them, and no others)."""
    num_positions, hidden_size = weights["position_embedding.weight"].shape
    num_layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    model = PlainGPT2(vocab_size, num_positions, hidden_size, num_layers, num_heads)
    model.to(weights["position_embedding.weight"].dtype)
    model.load_state_dict(
        {plain_name(name): to_plain(name, weight, num_heads, vocab_size) for name, weight in weights.items()}
    )
    return model
