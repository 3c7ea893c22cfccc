"""What --data-path and --split say, as numbers and names."""

import math
from collections.abc import Sequence

from megascale.utils.errors import UserError

__all__ = ["parse_data_path", "parse_split"]


def parse_data_path(data_path: Sequence[str], flag: str = "--data-path") -> list[tuple[float | None, str]]:
    """Return the (weight, prefix) pairs of a data path; all weights are None when none are given.

    Raises:
        UserError: weights and prefixes do not alternate, or a weight is not a positive number.
    """
    if not data_path or _number(data_path[0]) is None:
        numbers = [item for item in data_path if _number(item) is not None]
        if numbers:
            raise UserError(
                f"{flag} {' '.join(data_path)}: starts with a prefix, but {numbers[0]} is a number. Give either "
                f"prefixes only, or WEIGHT PREFIX for each; write a prefix that looks like a number as ./{numbers[0]}."
            )
        return [(None, prefix) for prefix in data_path]
    if len(data_path) % 2:
        raise UserError(
            f"{flag} {' '.join(data_path)}: starts with a weight, so weights and prefixes must alternate, but "
            f"there are {len(data_path)} items, an odd number."
        )
    pairs: list[tuple[float | None, str]] = []
    for weight_text, prefix in zip(data_path[::2], data_path[1::2], strict=True):
        weight = _number(weight_text)
        if weight is None or _number(prefix) is not None:
            raise UserError(
                f"{flag} {' '.join(data_path)}: expected WEIGHT PREFIX, found {weight_text!r} {prefix!r}; weights and "
                f"prefixes must alternate."
            )
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"{flag}: the weight {weight_text} of {prefix} must be greater than 0 and finite.")
        pairs.append((weight, prefix))
    return pairs


def parse_split(split: str, flag: str = "--split") -> tuple[float, ...]:
    """Return the ratios of a split: training, validation and, if a third is given, a part that is never read.

    Raises:
        UserError: not two or three numbers, one of them negative, or nothing left for training.
    """
    ratios = [_number(part) for part in split.split(",")]
    numbers = [ratio for ratio in ratios if ratio is not None and math.isfinite(ratio)]
    example = 'for example "29,1" (one document in thirty for validation)'
    if len(numbers) != len(ratios) or len(numbers) not in (2, 3):
        raise UserError(f"{flag} {split!r} must be two or three numbers with commas between them, {example}.")
    if min(numbers) < 0:
        raise UserError(f"{flag} {split!r}: {min(numbers):g} is negative; parts are at least 0, {example}.")
    if numbers[0] == 0:
        raise UserError(f"{flag} {split!r} leaves no documents for training: the first part must exceed 0, {example}.")
    return tuple(numbers)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
