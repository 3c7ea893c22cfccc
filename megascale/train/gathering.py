"""Small facts from every rank to every rank."""

from __future__ import annotations

import json
from typing import Any

import torch

from megascale.parallel.context import Axis


def gather_facts(axis: Axis, facts: Any) -> list[Any]:
    """Return the ranks' `facts` (anything JSON can hold) in rank order, on every rank of the axis."""
    text = torch.frombuffer(bytearray(json.dumps(facts).encode("utf-8")), dtype=torch.uint8)
    lengths = axis.all_gather(torch.tensor([text.numel()], device=axis.device), dim=0).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=axis.device)
    padded[: text.numel()] = text.to(axis.device)
    texts = axis.all_gather(padded, dim=0).view(axis.size, -1).cpu()
    return [
        json.loads(bytes(row[:length].tolist()).decode("utf-8")) for row, length in zip(texts, lengths, strict=True)
    ]
