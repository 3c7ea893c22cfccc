"""Configurations that several tests start from."""

from dataclasses import replace

from megascale.config.schema import ModelConfig, RunConfig, TrainConfig


def small_run() -> RunConfig:
    """Return a valid configuration without a preset."""
    return RunConfig(
        model=ModelConfig(num_layers=2, hidden_size=48, num_attention_heads=4, vocab_size=1000),
        train=TrainConfig(train_iters=20),
    )


def with_fields(config: RunConfig, **fields: object) -> RunConfig:
    """Return `config` with fields replaced, given as section__field."""
    for name, value in fields.items():
        section, field = name.split("__")
        config = replace(config, **{section: replace(getattr(config, section), **{field: value})})
    return config
