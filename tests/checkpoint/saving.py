"""What the checkpoint tests share: ranks as threads of one process, and tensors cut in known ways."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megascale.checkpoint.boxes import Box, slices_within
from megascale.checkpoint.save import save_checkpoint
from megascale.checkpoint.tensors import TensorSlice

BARRIER_SECONDS = 30


def run_ranks(world_size: int, act: Callable[[int, Callable[[], None]], Any]) -> list[Any]:
    """`act(rank, barrier)` on `world_size` threads; by rank what it returned, or the exception it ended with."""
    barrier = threading.Barrier(world_size)
    results: list[Any] = [None] * world_size

    def wait() -> None:
        barrier.wait(BARRIER_SECONDS)

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank, wait)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def save_results(
    directory: Path, step: int, slices_by_rank: Sequence[Sequence[TensorSlice]], **given: Any
) -> list[Any]:
    """Save from one thread per entry of `slices_by_rank`; by rank the path or the exception."""
    state, config = given.get("state", {"step": step}), given.get("config", {"model": {"num_layers": 2}})
    world_size = len(slices_by_rank)

    def act(rank: int, barrier: Callable[[], None]) -> Path:
        return save_checkpoint(directory, step, slices_by_rank[rank], state, config, rank, world_size, barrier)

    return run_ranks(world_size, act)


def save(directory: Path, step: int, slices_by_rank: Sequence[Sequence[TensorSlice]], **given: Any) -> Path:
    """As `save_results`, where every rank must succeed."""
    results = save_results(directory, step, slices_by_rank, **given)
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert len(set(results)) == 1
    return results[0]


def cut(name: str, tensor: torch.Tensor, box: Box) -> TensorSlice:
    """The slice `box` of the whole `tensor`, a copy."""
    whole = Box((0,) * tensor.dim(), tuple(tensor.shape))
    return TensorSlice(name, tuple(tensor.shape), box.offset, tensor[slices_within(box, whole)].clone())


def empty(name: str, tensor: torch.Tensor, box: Box) -> TensorSlice:
    """A slice to be filled from a checkpoint; it holds a value that no test tensor holds."""
    data = torch.full(box.shape, -7, dtype=torch.float64).to(tensor.dtype)
    return TensorSlice(name, tuple(tensor.shape), box.offset, data)


def even_boxes(shape: tuple[int, ...], dim: int, num_parts: int) -> list[Box]:
    """`shape` cut into `num_parts` equal parts along `dim`, as a parallel layer is."""
    size = shape[dim] // num_parts
    assert size * num_parts == shape[dim]
    return [
        Box(
            tuple(part * size if index == dim else 0 for index in range(len(shape))),
            tuple(size if index == dim else length for index, length in enumerate(shape)),
        )
        for part in range(num_parts)
    ]


def random_boxes(shape: tuple[int, ...], num_cuts: int, source: random.Random) -> list[Box]:
    """`shape` cut by `num_cuts` random straight cuts, each through one of the boxes there are: uneven, not a grid."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(num_cuts):
        offset, lengths = boxes.pop(source.randrange(len(boxes)))
        dim = source.randrange(len(shape))
        at = source.randint(0, lengths[dim])  # 0 and the full length leave an empty box, which is allowed
        for start, length in ((0, at), (at, lengths[dim] - at)):
            boxes.append(
                Box(
                    tuple(value + start if index == dim else value for index, value in enumerate(offset)),
                    tuple(length if index == dim else value for index, value in enumerate(lengths)),
                )
            )
    source.shuffle(boxes)
    return boxes


def weights() -> dict[str, torch.Tensor]:
    """A few tensors of different types and numbers of dims, all values of one tensor distinct."""
    return {
        "embedding.weight": torch.arange(96, dtype=torch.float32).reshape(8, 12) / 7,
        "norm.bias": torch.arange(8, dtype=torch.float64) / 3,
        "rng.state": torch.arange(40, dtype=torch.uint8),
        "scale": torch.tensor(65536.0),
    }


def small_checkpoint(directory: Path, step: int, **given: Any) -> Path:
    """A checkpoint of `weights()` written by two ranks: the matrix split in two, the rest held by rank 1."""
    tensors = weights()
    name = "embedding.weight"
    first, second = (cut(name, tensors[name], box) for box in even_boxes((8, 12), 0, 2))
    whole = [TensorSlice.whole(other, tensors[other]) for other in tensors if other != name]
    return save(directory, step, [[first], [second, *whole]], **given)
