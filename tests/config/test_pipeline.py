"""Schedules run on a simulated pipeline: each task once, dependencies kept, no deadlock, the bubble of the paper."""

import pytest

from megascale.config.accounting import num_parameters, num_parameters_per_rank
from megascale.config.pipeline import (
    Pass,
    Task,
    bubble_fraction,
    forward_schedule,
    num_chunks,
    schedule,
    stages_of_rank,
)
from megascale.config.resolution import resolve
from tests.config.examples import small_run, with_fields

# (pp, chunks, micro-batches)
CASES = [
    (1, 1, 3),
    (2, 1, 1),
    (2, 1, 4),
    (3, 1, 7),
    (4, 1, 2),
    (4, 1, 8),
    (8, 1, 32),
    (2, 2, 2),
    (2, 2, 4),
    (2, 3, 8),
    (3, 2, 6),
    (4, 2, 4),
    (4, 2, 8),
    (4, 4, 16),
    (8, 2, 32),
]
FORWARD_TIME, BACKWARD_TIME = 1.0, 2.0


class Deadlock(AssertionError):
    """Every rank that has work left waits for another."""


def simulate(orders, pp, chunks, room=None):
    """Run each rank's tasks in order; return (end of the step, most micro-batches x chunks kept on each rank).

    A task waits for the message it reads, and its rank then waits until at most `room` of the messages that it sent
    over one link (to one rank in one direction) are unread; None: sends never wait. With room 0 a message is read when
    the reader has come to its task and waits for none of its own messages.
    """
    num_stages = pp * chunks
    done: dict[tuple[Pass, int, int], float] = {}
    started: dict[tuple[Pass, int, int], float] = {}
    sent: dict[tuple[int, Pass], list[tuple[Pass, int, int]]] = {(r, d): [] for r in range(pp) for d in Pass}
    clock, position, unsent, kept, most = [0.0] * pp, [0] * pp, [False] * pp, [0] * pp, [0] * pp

    def needed(rank, task):
        stage = task.chunk * pp + rank
        if task.direction is Pass.FORWARD:
            return [(Pass.FORWARD, stage - 1, task.micro_batch)] if stage > 0 else []
        after = [(Pass.BACKWARD, stage + 1, task.micro_batch)] if stage < num_stages - 1 else []
        return [*after, (Pass.FORWARD, stage, task.micro_batch)]

    def is_read(message):
        direction, stage, micro_batch = message
        reader, task = stage % pp, Task(direction, micro_batch, stage // pp)
        waits_there = position[reader] < len(orders[reader]) and orders[reader][position[reader]] == task
        return message in started or (room == 0 and waits_there and not unsent[reader])

    def still_sends(rank):
        """Whether too many messages on the link of the rank's last task are unread, so that the rank cannot go on."""
        if unsent[rank]:
            last = orders[rank][position[rank] - 1]
            messages = sent[rank, last.direction]
            oldest = messages[-1 - room] if room is not None and len(messages) > room else None
            unsent[rank] = oldest is not None and not is_read(oldest)
            if not unsent[rank] and oldest is not None:
                clock[rank] = max(clock[rank], started.get(oldest, 0.0))
        return unsent[rank]

    def run(rank, task):
        is_forward = task.direction is Pass.FORWARD
        stage = task.chunk * pp + rank
        start = max([clock[rank], *(done[key] for key in needed(rank, task))])
        clock[rank] = start + (FORWARD_TIME if is_forward else BACKWARD_TIME) / chunks
        started[(task.direction, stage, task.micro_batch)] = start
        done[(task.direction, stage, task.micro_batch)] = clock[rank]
        kept[rank] += 1 if is_forward else -1
        most[rank] = max(most[rank], kept[rank])
        position[rank] += 1
        target = stage + (1 if is_forward else -1)
        if 0 <= target < num_stages:
            sent[rank, task.direction].append((task.direction, target, task.micro_batch))
            unsent[rank] = True

    while any(position[rank] < len(orders[rank]) for rank in range(pp)):
        moved = False
        for rank in range(pp):
            while position[rank] < len(orders[rank]) and not still_sends(rank):
                task = orders[rank][position[rank]]
                if any(key not in done for key in needed(rank, task)):
                    break
                run(rank, task)
                moved = True
        if not moved:
            raise Deadlock(str(position))
    return max(clock), most


def _orders(pp, chunks, num_micro_batches):
    return [schedule(pp, chunks, num_micro_batches, rank) for rank in range(pp)]


@pytest.mark.parametrize(("pp", "chunks", "num_micro_batches"), CASES)
def test_each_micro_batch_passes_each_chunk_once_each_way(pp, chunks, num_micro_batches):
    expected = {
        Task(direction, micro_batch, chunk)
        for direction in Pass
        for micro_batch in range(num_micro_batches)
        for chunk in range(chunks)
    }
    for order in _orders(pp, chunks, num_micro_batches):
        assert len(order) == len(expected)
        assert set(order) == expected


@pytest.mark.parametrize("room", [None, 1])
@pytest.mark.parametrize(("pp", "chunks", "num_micro_batches"), CASES)
def test_a_step_ends_and_is_idle_as_long_as_the_paper_says(pp, chunks, num_micro_batches, room):
    """Narayanan et al. 2021, section 2.2: bubble / ideal time = (p - 1) / m, and 1/v of it interleaved."""
    end, _ = simulate(_orders(pp, chunks, num_micro_batches), pp, chunks, room)
    ideal = num_micro_batches * (FORWARD_TIME + BACKWARD_TIME)
    assert (end - ideal) / ideal == pytest.approx(bubble_fraction(pp, chunks, num_micro_batches), rel=1e-12)


@pytest.mark.parametrize(("pp", "chunks", "num_micro_batches"), CASES)
def test_each_link_carries_messages_in_the_order_they_are_awaited(pp, chunks, num_micro_batches):
    """So that one first-in-first-out channel per link and direction is enough, without tags."""
    orders, num_stages = _orders(pp, chunks, num_micro_batches), pp * chunks
    for direction, step in ((Pass.FORWARD, 1), (Pass.BACKWARD, -1)):
        for rank in range(pp):
            receiver = (rank + step) % pp
            sent = [
                (task.chunk * pp + rank + step, task.micro_batch)
                for task in orders[rank]
                if task.direction is direction
            ]
            awaited = [
                (task.chunk * pp + receiver, task.micro_batch)
                for task in orders[receiver]
                if task.direction is direction
            ]
            last = num_stages - 1 if direction is Pass.FORWARD else 0
            first = 0 if direction is Pass.FORWARD else num_stages - 1
            assert [m for m in sent if 0 <= m[0] < num_stages] == [m for m in awaited if m[0] != first], (rank, last)


@pytest.mark.parametrize(("pp", "num_micro_batches"), [(2, 4), (4, 8), (4, 2), (8, 32)])
def test_1f1b_keeps_few_activations(pp, num_micro_batches):
    """Rank r keeps p - r micro-batches; all forward passes first would keep all of them."""
    _, most = simulate(_orders(pp, 1, num_micro_batches), pp, 1)
    assert most == [min(pp - rank, num_micro_batches) for rank in range(pp)]
    gpipe = [tuple(sorted(order, key=lambda task: task.direction is Pass.BACKWARD)) for order in _orders(pp, 1, 8)]
    assert simulate(gpipe, pp, 1)[1] == [8] * pp


def test_the_order_by_hand():
    f, b = Pass.FORWARD, Pass.BACKWARD
    assert [(t.direction, t.micro_batch) for t in schedule(2, 1, 3, 0)] == [
        (f, 0),
        (f, 1),
        (b, 0),
        (f, 2),
        (b, 1),
        (b, 2),
    ]
    assert [(t.direction, t.micro_batch) for t in schedule(2, 1, 3, 1)] == [
        (f, 0),
        (b, 0),
        (f, 1),
        (b, 1),
        (f, 2),
        (b, 2),
    ]
    # Two ranks, two chunks: rank 1 passes micro-batches 0 and 1 through chunk 0 before chunk 1.
    assert [(t.direction, t.micro_batch, t.chunk) for t in schedule(2, 2, 2, 1)] == [
        (f, 0, 0),
        (f, 1, 0),
        (f, 0, 1),
        (b, 0, 1),
        (f, 1, 1),
        (b, 1, 1),
        (b, 0, 0),
        (b, 1, 0),
    ]


@pytest.mark.parametrize(("pp", "chunks", "num_micro_batches"), [*CASES, (2, 2, 3), (4, 2, 5), (3, 3, 1)])
def test_a_forward_only_step_ends(pp, chunks, num_micro_batches):
    """Validation: with any number of micro-batches."""
    order = forward_schedule(pp, chunks, num_micro_batches)
    assert len(set(order)) == len(order) == chunks * num_micro_batches
    simulate([order] * pp, pp, chunks)


def test_the_simulation_would_notice_a_deadlock():
    """Rank 1 asks for micro-batch 1 first, but rank 0 has to see it back before it sends another."""
    f, b = Pass.FORWARD, Pass.BACKWARD
    one_by_one = tuple(Task(direction, m, 0) for m in range(2) for direction in (f, b))
    swapped = tuple(Task(direction, m, 0) for m in (1, 0) for direction in (f, b))
    with pytest.raises(Deadlock):
        simulate([one_by_one, swapped], 2, 1)


def test_sends_must_not_wait_for_their_receiver():
    """Neighbours in the steady state send to each other at once: with sends that wait, 1F1B itself would deadlock."""
    orders = _orders(2, 1, 4)
    simulate(orders, 2, 1, room=1)
    with pytest.raises(Deadlock):
        simulate(orders, 2, 1, room=0)


def test_stages_hold_all_layers_once_in_order():
    for num_layers, pp, chunks in ((8, 2, 1), (8, 2, 2), (24, 4, 3), (6, 6, 1)):
        stages = [stage for rank in range(pp) for stage in stages_of_rank(num_layers, pp, chunks, rank)]
        in_order = sorted(stages, key=lambda stage: stage.index)
        assert [layer for stage in in_order for layer in stage.layers] == list(range(num_layers))
        assert [stage.is_first for stage in in_order] == [True] + [False] * (pp * chunks - 1)
        assert [stage.is_last for stage in in_order] == [False] * (pp * chunks - 1) + [True]
    assert [list(stage.layers) for stage in stages_of_rank(8, 2, 2, pp_rank=1)] == [[2, 3], [6, 7]]


def test_chunks_of_a_configuration():
    config = with_fields(small_run(), model__num_layers=24, parallel__pipeline_model_parallel_size=4)
    assert num_chunks(config) == 1
    for depth, expected in ((6, 1), (3, 2), (1, 6)):
        assert num_chunks(with_fields(config, parallel__num_layers_per_virtual_pipeline_stage=depth)) == expected


def test_the_parameters_of_all_stages_make_the_model_and_a_copy_of_the_embedding():
    config = with_fields(small_run(), model__num_layers=12, parallel__pipeline_model_parallel_size=4)
    config = resolve(config, world_size=4)
    on_stages = sum(num_parameters_per_rank(config, pp_rank=rank) for rank in range(4))
    assert on_stages - num_parameters(config) == 1024 * 48
    untied = with_fields(config, model__untie_embeddings_and_output_weights=True)
    assert sum(num_parameters_per_rank(untied, pp_rank=rank) for rank in range(4)) == num_parameters(untied)
