"""One implementation's training step, timed on request: the process that training_vs_peers.py starts for each.

Reads a line on standard input for each round, runs a few steps (forward, backward, AdamW) and answers with the seconds
per step and its peak memory, as JSON. Waits in between, so that only one implementation computes at a time. Peers run
in an environment of their own; this file imports nothing but torch and the one it measures.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import torch

# The shape of GPT-2, small enough for a laptop; vocabulary padded as nanoGPT does.
SHAPE = SimpleNamespace(layers=6, hidden=384, heads=6, sequence=256, batch=8, vocabulary=50304)
STEPS_PER_ROUND = 2
Step = Callable[[torch.Tensor], float]


def torch_step(model: torch.nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor], precision: str) -> Step:
    """Return a plain training step around a peer's model: fused AdamW, autocast for bf16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def step(tokens: torch.Tensor) -> float:
        context: AbstractContextManager[object] = (
            torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
        )
        with context:
            loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def nanogpt(precision: str, path: str | None) -> Step:
    spec = importlib.util.spec_from_file_location("nanogpt_model", str(path))
    assert spec is not None, "give nanoGPT's model.py with --nanogpt"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    shape = {"n_layer": SHAPE.layers, "n_head": SHAPE.heads, "n_embd": SHAPE.hidden}
    model = module.GPT(
        module.GPTConfig(block_size=SHAPE.sequence, vocab_size=SHAPE.vocabulary, dropout=0.0, bias=True, **shape)
    )
    return torch_step(model, lambda t: model(t[:, :-1].contiguous(), t[:, 1:].contiguous())[1], precision)


def transformers(precision: str, path: str | None) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=SHAPE.vocabulary,
        n_positions=SHAPE.sequence,
        n_layer=SHAPE.layers,
        n_head=SHAPE.heads,
        n_embd=SHAPE.hidden,
        **off,
    )
    model = GPT2LMHeadModel(config).train()
    return torch_step(model, lambda t: model(input_ids=t[:, :-1], labels=t[:, :-1]).loss, precision)


def litgpt(precision: str, path: str | None) -> Step:
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    model = GPT(
        Config(
            block_size=SHAPE.sequence,
            n_layer=SHAPE.layers,
            n_head=SHAPE.heads,
            n_embd=SHAPE.hidden,
            padded_vocab_size=SHAPE.vocabulary,
            vocab_size=SHAPE.vocabulary,
            parallel_residual=False,
        )
    )
    return torch_step(model, lambda t: chunked_cross_entropy(model(t[:, :-1]), t[:, 1:]), precision)


def megascale(precision: str, path: str | None) -> Step:
    from megascale.config.resolution import resolve
    from megascale.config.schema import DataConfig, ModelConfig, RunConfig, TrainConfig
    from megascale.model.gpt import GPT
    from megascale.optim.build import ModelOptimizer
    from megascale.parallel.context import single_process
    from megascale.parallel.random import RandomStreams
    from megascale.parallel.sharding import initialise
    from megascale.train.host import tune_malloc

    tune_malloc()  # as a run on a CPU does by default
    config = RunConfig(
        model=ModelConfig(
            num_layers=SHAPE.layers,
            hidden_size=SHAPE.hidden,
            num_attention_heads=SHAPE.heads,
            vocab_size=SHAPE.vocabulary,
            make_vocab_size_divisible_by=128,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        data=DataConfig(seq_length=SHAPE.sequence),
        train=TrainConfig(micro_batch_size=SHAPE.batch, train_iters=1000, bf16=precision == "bf16"),
    )
    config = resolve(config, 1)
    context = single_process()
    streams = RandomStreams(1, context.tp, context.device)
    model = GPT(config.model, context.tp, streams)
    initialise(model, 1)
    optimizer = ModelOptimizer(model, config, context.tp, context.dp)
    scale = 1.0 / (SHAPE.batch * SHAPE.sequence)
    weights = torch.ones(SHAPE.batch, SHAPE.sequence)

    def step(tokens: torch.Tensor) -> float:
        optimizer.zero_gradients()
        loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), weights, scale) * scale
        optimizer.expect_last_backward()
        loss.backward()
        optimizer.step(1.0)
        return loss.item()

    return step


IMPLEMENTATIONS = {"megascale": megascale, "nanogpt": nanogpt, "transformers": transformers, "litgpt": litgpt}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("implementation", choices=IMPLEMENTATIONS)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--nanogpt", help="path of nanoGPT's model.py")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    step = IMPLEMENTATIONS[arguments.implementation](arguments.precision, arguments.nanogpt)
    generator = torch.Generator().manual_seed(2)
    for _ in sys.stdin:
        tokens = torch.randint(SHAPE.vocabulary, (SHAPE.batch, SHAPE.sequence + 1), generator=generator)
        started = time.perf_counter()
        for _ in range(STEPS_PER_ROUND):
            loss = step(tokens)
        seconds = (time.perf_counter() - started) / STEPS_PER_ROUND
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        # A line of its own, marked, since some peers print too.
        print("RESULT " + json.dumps({"seconds": seconds, "peak_gb": peak, "loss": loss}), flush=True)


if __name__ == "__main__":
    main()
