"""64-bit fingerprints of tensors, computed where the tensors are.

The elements' bit patterns, each times an odd number that depends on its place, are added up modulo 2^64. One changed
element always changes the sum, since an odd factor maps no difference to 0; several, and elements that swap places,
change it but for one chance in about 2^64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Elements at a time, so that the 64-bit copies stay small beside the tensor.
_CHUNK = 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# SplitMix64's increment and first multiplier (Steele et al. 2014), as signed 64-bit numbers.
_INCREMENT, _MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64


@torch.no_grad()
def fingerprints(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return an int64 fingerprint per tensor, on the tensors' device. Bits count: -0.0 is not 0.0."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    return torch.stack([_fingerprint(tensor.detach()) for tensor in tensors])


def as_text(fingerprint: int) -> str:
    """Return a fingerprint as 16 hexadecimal digits."""
    return f"{fingerprint % 2**64:016x}"


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + chunk.numel(), dtype=torch.int64, device=tensor.device)
        factors = places.mul_(_INCREMENT)
        factors = factors.bitwise_xor_(factors >> 30).mul_(_MULTIPLIER).bitwise_or_(1)
        total += (chunk * factors).sum()
    return total
