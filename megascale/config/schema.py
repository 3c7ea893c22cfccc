"""What a run is: every option once, with its type, default, flag and meaning.

The flags, the YAML keys, --help and the checks are all generated from these fields. A field is typed as it stands in a
resolved configuration; one that is marked `derived` or `required` may be None until `resolve()` has filled it in.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Literal, get_type_hints

from megascale.config.option import Option, as_option, option, required

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "FaultConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Option",
    "ParallelConfig",
    "RunConfig",
    "ScheduleConfig",
    "TrainConfig",
    "options",
]


@dataclass(frozen=True)
class ModelConfig:
    """The network: a GPT-2 decoder unless told otherwise."""

    preset: str | None = option(
        None,
        "named model and recipe that fills in what is not given",
        flag="--model",
        aliases=("--preset",),
        metavar="PRESET",
    )
    num_layers: int = required("transformer layers")
    hidden_size: int = required("width of the residual stream")
    num_attention_heads: int = required("attention heads per layer; each is hidden size / heads wide")
    num_query_groups: int = option(
        None, "groups of attention heads that share one key and one value", derived="--num-attention-heads"
    )
    ffn_hidden_size: int = option(None, "width inside the MLP", derived="4 x --hidden-size, 8/3 x with swiglu")
    max_position_embeddings: int = option(None, "positions there are, in tokens", derived="--seq-length")
    vocab_size: int = option(None, "tokens of the vocabulary before padding", derived="the tokenizer's")
    make_vocab_size_divisible_by: int = option(
        1024, "the vocabulary is padded to a multiple of this, whatever the tensor-parallel size"
    )
    hidden_dropout: float = option(0.1, "dropout probability after the embedding and before each residual sum")
    attention_dropout: float = option(0.1, "dropout probability of the attention weights")
    init_method_std: float = option(
        0.02, "standard deviation of initial weights; / sqrt(2 x layers) for those before a residual sum"
    )
    position_embedding_type: Literal["learned_absolute", "rope"] = option(
        "learned_absolute", "how positions enter: a learned vector each, or by rotating queries and keys"
    )
    rotary_base: float = option(
        10000.0, "base of the wavelengths of rope; the longest is about 2 pi times it, in tokens"
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = option(
        "LayerNorm", "kind of norm; RMSNorm has no mean and no bias"
    )
    norm_position: Literal["pre", "post"] = option(
        "pre", "where the norms are: before each attention and MLP, or after each residual sum"
    )
    layernorm_epsilon: float = option(
        1e-5, "added to the variance (RMSNorm: mean square) in every norm", aliases=("--norm-epsilon",)
    )
    activation: Literal["gelu", "relu", "swiglu"] = option(
        "gelu",
        "what the MLP does with its inner features; swiglu has a second, gating product",
        shorthands={"--swiglu": "swiglu"},
    )
    disable_bias_linear: bool = option(False, "leave the bias out of every linear layer")
    untie_embeddings_and_output_weights: bool = option(
        False, "give the output layer a weight of its own instead of the word embedding's"
    )


@dataclass(frozen=True)
class ParallelConfig:
    """How the run is spread over processes."""

    tensor_model_parallel_size: int = option(
        1, "consecutive ranks that share each layer of the model", aliases=("--model-parallel-size",)
    )
    pipeline_model_parallel_size: int = option(1, "stages of consecutive layers that one copy of the model is cut into")
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None,
        "layers a micro-batch passes before it goes to the next rank; fewer than a rank holds interleave the schedule",
        derived="all layers of the rank",
    )
    sequence_parallel: bool = option(
        False, "split norms, dropout and residual sums over the tensor-parallel ranks by tokens: less memory per rank"
    )
    async_tensor_model_parallel_allreduce: bool = option(
        True, "reduce the gradient of a tensor-parallel layer's input while the weight's is computed"
    )
    overlap_grad_reduce: bool = option(
        False, "sum gradients over data-parallel ranks in buckets, while the last backward pass of a step runs"
    )
    use_distributed_optimizer: bool = option(
        False, "share the optimizer's state and work among data-parallel ranks (ZeRO-1)"
    )
    overlap_param_gather: bool = option(
        False, "with the distributed optimizer: gather the new parameters while the next forward pass runs"
    )
    bucket_cap_mb: float = option(150.0, "size of the buckets of overlapped communication, in MB of 2^20 bytes")
    world_size: int | None = option(
        None,
        "processes of the run: with --dry-run the number to plan for, otherwise a promise that is checked at launch",
        derived="as launched",
    )
    distributed_backend: Literal["auto", "gloo", "nccl"] = option(
        "auto", "communication library; auto is nccl on cuda and gloo on cpu"
    )
    distributed_timeout_minutes: float = option(10.0, "minutes after which a collective that nobody joins is an error")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and gradient clipping."""

    weight_decay: float = option(0.01, "decoupled weight decay; not of biases and layer norms")
    adam_beta1: float = option(0.9, "decay of the running mean of gradients")
    adam_beta2: float = option(0.999, "decay of the running mean of squared gradients")
    adam_eps: float = option(1e-8, "added to the root of the mean square")
    optimizer_backend: Literal["auto", "torch", "apex"] = option(
        "auto", "whose fused AdamW; auto is NVIDIA apex's where it is installed and the weights are on cuda"
    )
    clip_grad: float = option(1.0, "largest global L2 norm of the gradient; 0 = no clipping")


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate, step by step."""

    lr: float = option(1.5e-4, "learning rate at the end of the warm-up")
    min_lr: float = option(1e-5, "floor of the decay")
    lr_decay_style: Literal["cosine", "cosine-interp", "linear", "constant"] = option(
        "cosine", "cosine decays towards 0 and stops at the floor, cosine-interp decays to the floor"
    )
    lr_warmup_iters: int = option(0, "steps of linear warm-up from 0")
    lr_decay_iters: int = option(None, "step, counted from the start, at which the decay ends", derived="--train-iters")


@dataclass(frozen=True)
class DataConfig:
    """Which text is read, in which order."""

    data_path: tuple[str, ...] = option(
        (), "data sets by prefix (of .bin and .idx): PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ...", metavar="ITEM"
    )
    valid_data_path: tuple[str, ...] = option(
        (), "data sets for validation, written likewise; then --split is not used"
    )
    split: str = option(
        "29,1", "parts of the documents for training, validation and, if a third is given, neither", metavar="RATIOS"
    )
    split_seed: int = option(1234, "seed of the random assignment of documents to parts")
    num_shards: int = option(5, "shards that training documents are shuffled within; their order is shuffled as well")
    seq_length: int = option(1024, "tokens per sample")
    tokenizer_type: Literal["GPT2BPETokenizer", "HuggingFaceTokenizer"] | None = option(
        None, "kind of tokenizer", aliases=("--tokenizer",), derived="from which tokenizer files are given"
    )
    vocab_file: str | None = option(None, "vocab.json of GPT2BPETokenizer", metavar="FILE")
    merge_file: str | None = option(None, "merges.txt of GPT2BPETokenizer", metavar="FILE")
    tokenizer_model: str | None = option(None, "tokenizer.json of HuggingFaceTokenizer", metavar="FILE")
    eod_mask_loss: bool = option(False, "leave out of the loss what is predicted from an end-of-document token")


@dataclass(frozen=True)
class TrainConfig:
    """The training loop: batches, steps, precision, device."""

    micro_batch_size: int = option(8, "samples per data-parallel rank and forward pass")
    global_batch_size: int = option(
        None, "samples per step, all ranks together", derived="--micro-batch-size x data-parallel size"
    )
    train_iters: int = required("steps of the whole run, resumed parts included")
    eval_interval: int = option(1000, "steps from one validation to the next")
    eval_iters: int = option(100, "global batches per validation")
    exit_interval: int | None = option(None, "save and exit whenever the step is a multiple of this")
    seed: int = option(1234, "seed of initial weights, dropout and sample order")
    params_dtype: Literal["float32", "float64"] = option("float32", "type of parameters and optimizer state")
    fp16: bool = option(False, "compute in float16, with float32 master weights and loss scaling")
    bf16: bool = option(False, "compute in bfloat16, with float32 master weights")
    loss_scale: float | None = option(None, "constant loss scale of --fp16", derived="dynamic")
    loss_scale_preset: Literal["megatron", "fairseq", "transformer-xl"] = option(
        "megatron", "whose constants of the dynamic loss scale of --fp16 are used where none are given"
    )
    initial_loss_scale: float | None = option(
        None, "dynamic loss scale of --fp16 at the first step", derived="the preset's: 2^32, 2^7 or 2^16"
    )
    loss_scale_window: int | None = option(
        None, "steps without overflow after which the loss scale doubles", derived="the preset's: 1000, 2000 or 1000"
    )
    hysteresis: int | None = option(
        None, "overflows before the loss scale is halved", derived="the preset's: 2, 1 or 1"
    )
    min_loss_scale: float | None = option(
        None, "floor of the dynamic loss scale", derived="the preset's: 1, 0.0001 or 1"
    )
    fp16_pure: bool = option(
        False, "with --fp16: no float32 masters; weights and moments in float16 too (unstable, for comparison)"
    )
    accumulate_allreduce_grads_in_fp32: bool = option(
        None, "add up the gradients of --fp16 or --bf16 in float32", derived="with --bf16 only"
    )
    grad_reduce_dtype: Literal["float32", "half"] | None = option(
        None,
        "what data-parallel ranks send each other of their gradients; half: the 16-bit type of --fp16 or --bf16",
        shorthands={"--fp32-allreduce": "float32", "--grad-reduce-in-bf16": "half"},
        derived="as they are added up",
    )
    recompute_granularity: Literal["none", "selective", "full"] = option(
        "none",
        "activations recomputed in the backward pass: selective, those inside attention between its projections; full, "
        "all but the input of each layer",
        shorthands={"--checkpoint-activations": "full"},
    )
    label_smoothing: float = option(0.0, "probability spread evenly over the vocabulary in the training loss")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to compute; auto is cuda if there is one")
    tune_malloc: bool = option(True, "let glibc keep freed memory, which makes steps on the cpu faster")


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of the run and where it starts from."""

    save: str | None = option(
        None, "run directory: configuration, metrics, checkpoints; nothing is kept without it", metavar="DIRECTORY"
    )
    load: str | None = option(
        None, "run directory (its newest checkpoint) or one checkpoint to start from", metavar="DIRECTORY"
    )
    load_policy: Literal["newest", "newest-intact"] = option(
        "newest",
        "of a run directory: the newest checkpoint, or an error if it is damaged; or the newest one whose content "
        "proves to be what was saved (reads all of it)",
    )
    save_interval: int | None = option(None, "steps from one checkpoint to the next", derived="only at the end")
    async_save: bool = option(
        False, "write checkpoints while training goes on, from a copy in host memory as large as what the rank saves"
    )
    keep_last: int | None = option(
        None, "newest checkpoints that are kept when others are removed", derived="all are kept"
    )
    keep_every: int | None = option(
        None, "with --keep-last: checkpoints at multiples of this many steps are kept too", derived="none"
    )
    save_best: bool = option(
        False, "save whenever the validation loss is the lowest so far, and keep the checkpoint with the lowest"
    )


@dataclass(frozen=True)
class FaultConfig:
    """What happens when something goes wrong."""

    on_nonfinite: Literal["stop", "skip", "rewind"] = option(
        "stop", "when loss or gradients are nan or inf: end the run, leave the update out, or go back to a checkpoint"
    )
    on_loss_spike: Literal["ignore", "stop", "skip", "rewind"] = option(
        "ignore", "likewise, when the loss jumps far above those of the steps before"
    )
    loss_spike_threshold: float = option(6.0, "standard deviations above the mean that make a loss a spike")
    loss_spike_window: int = option(128, "steps that mean and deviation are taken over; half of them must be there")
    max_skipped_steps: int = option(10, "updates that may be left out in the whole run before it ends")
    max_rewinds: int = option(3, "times that the run may go back in all before it ends")
    exit_code_on_signal: int = option(
        75, "exit code after SIGTERM or SIGUSR1 and a last checkpoint; 75 means: try again"
    )
    hang_timeout_minutes: float | None = option(
        None,
        "minutes without a collective or a step after which each rank's whereabouts are told; 0 = never",
        derived="half of --distributed-timeout-minutes",
    )
    check_weight_hash_interval: int | None = option(
        None,
        "steps from one check that replicated weights are the same on all ranks to the next",
        aliases=("--check-weight-hash-across-dp-replicas-interval",),
        derived="never",
    )


@dataclass(frozen=True)
class LoggingConfig:
    """What the run tells."""

    log_interval: int = option(10, "steps from one logged record to the next")
    tensorboard: bool = option(True, "write TensorBoard events into the run directory")
    progress_bar: bool | None = option(None, "show a progress bar", derived="when stderr is a terminal")
    log_digests: bool = option(False, "write each rank's fingerprints of every step, for tools/compare_runs.py")
    log_rank_times_interval: int | None = option(
        None, "steps from one report of the ranks' own times to the next; names slow ranks", derived="never"
    )


@dataclass(frozen=True)
class RunConfig:
    """Everything a run is told, by section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


def options() -> Iterator[Option]:
    """Yield every option in the order of the schema."""
    for section, section_type in get_type_hints(RunConfig).items():
        hints = get_type_hints(section_type)
        for description in fields(section_type):
            yield as_option(section, description, hints[description.name])
