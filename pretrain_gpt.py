"""Pretrain a GPT: alone, or with torchrun over as many processes as there are GPUs (or CPU cores).

Everything that can be wrong with the flags and the files they name is found before torch is imported, and ends the
process with one message and exit code 2.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

from megascale.config.cli import ParsedRun, parse_run_config
from megascale.train.audit import print_audit
from megascale.train.elastic import resumed_after_restart
from megascale.train.prepare import prepare, print_description
from megascale.train.start import find_start
from megascale.utils.environment import LaunchEnvironment
from megascale.utils.errors import UserError, exit_with


def main() -> None:
    environment = LaunchEnvironment()
    try:
        environment = LaunchEnvironment.from_environ()
        parsed = parse_run_config(sys.argv[1:], environment, description="Pretrain a GPT.")
        if parsed.print_config or parsed.dry_run:
            print_description(parsed, environment)
        elif parsed.audit_step is not None:
            print_audit(parsed, parsed.audit_step, environment)
        else:
            raise SystemExit(pretrain(resumed_after_restart(parsed, environment), environment))
    except UserError as error:
        exit_with(error, environment)


def pretrain(parsed: ParsedRun, environment: LaunchEnvironment) -> int:
    """Check what the run needs, build it, from the ground up, and train; return the exit code."""
    run = prepare(parsed, environment)
    # Imported here: torch takes seconds to load, and a mistyped flag should not.
    from megascale.optim.build import ModelOptimizer
    from megascale.parallel.context import launch
    from megascale.parallel.random import RandomStreams
    from megascale.parallel.sharding import initialise
    from megascale.train.agreed_start import agree_on_start
    from megascale.train.build import build_loader, build_model
    from megascale.train.device import choose_backend, choose_device
    from megascale.train.failures import failure_directory, first_failure_told_once
    from megascale.train.metrics import RunMetrics
    from megascale.train.observe import observing
    from megascale.train.report import announce, conclude, open_run_directory
    from megascale.train.rewind import restore_newest
    from megascale.train.saving import build_saving
    from megascale.train.snapshot import load_snapshot
    from megascale.train.state import TrainState
    from megascale.train.trainer import Trainer

    device = choose_device(run.config, environment)
    backend, timeout = choose_backend(run.config, device), run.config.parallel.distributed_timeout_minutes
    with ExitStack() as stack:
        context = stack.enter_context(
            launch(run.layout, environment.rank, device, backend, timeout, restart_count=environment.restart_count)
        )
        failures = failure_directory(run.config.checkpoint.save, context.world)
        stack.enter_context(first_failure_told_once(failures, environment))
        run = agree_on_start(
            run,
            context.world,
            start_without=lambda damaged: find_start(parsed.config, damaged),
            prepare_again=lambda start: prepare(parsed, environment, start),
        )
        config, train, sources = run.config, run.config.train, run.sources
        streams = RandomStreams(train.seed, context.tp, device)
        model = build_model(config, context, streams)
        if run.start is None:
            initialise(model, train.seed)
        optimizer = ModelOptimizer(model, config, context.tp, context.dp, context.pp)
        state = load_snapshot(run.start, optimizer) if run.start else TrainState()
        directory = open_run_directory(run, context)
        metrics = stack.enter_context(
            RunMetrics(directory, state.step, train.train_iters, context.speaks, config.logging)
        )
        metrics.say(announce(run, context, state))
        metrics.say(optimizer.describe())
        saving = stack.enter_context(build_saving(directory, optimizer, config, context))
        observers = observing(config, directory, context, model, optimizer, metrics, state.step)
        trainer = Trainer(
            config,
            context,
            model,
            optimizer,
            streams,
            build_loader(sources.train, config, context, sources.eod_id),
            build_loader(sources.valid, config, context, sources.eod_id) if sources.valid is not None else None,
            state,
            metrics,
            save=saving,
            finish_saving=saving.finish,
            restore=lambda: restore_newest(directory, optimizer, context),
            observers=stack.enter_context(observers),
        )
        result = trainer.fit()
        if context.speaks:
            metrics.say(conclude(run, result, directory))
    return config.faults.exit_code_on_signal if result.by_signal else 0


if __name__ == "__main__":
    main()
