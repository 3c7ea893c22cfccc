"""A transformer decoder: by default GPT-2, pre-norm with learned positions and a head tied to the word embedding.

Radford et al. 2019; Shoeybi et al. 2019, section 3 for how it is split. The model is told its axis and its random
streams and knows nothing of the trainer, nor of data parallelism. What it is made of, `model.parts` chooses.

Legend: s sequence, b batch, h hidden, v padded vocabulary, t tensor-parallel ranks, L layers.

Communication over the tensor axis per forward and backward pass: 4L + 2 all-reduces of s*b*h elements (6L + 2 with
recomputation), and 3 scalars per token in the loss. With the sequence split, each is a reduce-scatter and an all-gather
(see `parallel.boundary`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from megascale.config.pipeline import PipelineStage, stages_of_rank
from megascale.config.schema import ModelConfig
from megascale.model.parts import ModelParts
from megascale.parallel.boundary import Boundary
from megascale.parallel.context import Axis
from megascale.parallel.cross_entropy import linear_cross_entropy, vocab_parallel_cross_entropy
from megascale.parallel.random import RandomStreams
from megascale.parallel.recompute import recompute


class GPT(nn.Module):
    """A GPT language model over one tensor axis, or the pipeline stages of it that one rank holds.

    A stage's parameters have the names that they have in the whole model. The whole model is
    `loss(run_layers(embed(tokens), all layers), ..)`; of these a stage can do what it holds the parts for.

    Args:
        config: The model section of a resolved configuration (sizes set, vocabulary known).
        axis: The tensor axis.
        streams: The dropout streams of this rank.
        dtype, device: Of the parameters. They are left uninitialised: see `parallel.sharding.initialise`.
        recompute_granularity: What is recomputed in the backward pass: none, selective (attention cores) or full
            (blocks).
        label_smoothing: Weight of the uniform distribution in the training target.
        boundary: How activations lie outside the tensor-parallel regions; None: replicated.
        stages: The pipeline stages to hold; none given: the whole model.
        pp_ends: The axis over the first and the last stage, which both hold the word embedding if the head is tied.
    """

    def __init__(
        self,
        config: ModelConfig,
        axis: Axis,
        streams: RandomStreams,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        recompute_granularity: str = "none",
        label_smoothing: float = 0.0,
        boundary: Boundary | None = None,
        stages: Sequence[PipelineStage] = (),
        pp_ends: Axis | None = None,
    ) -> None:
        super().__init__()
        parts = ModelParts(
            config,
            axis,
            streams,
            dtype,
            device or torch.device("cpu"),
            boundary,
            recompute_core=recompute_granularity == "selective",
        )
        self.config = config
        self.axis = axis
        self.streams = streams
        self.boundary = parts.boundary
        self.recompute_blocks = recompute_granularity == "full"
        self.label_smoothing = label_smoothing
        self.stages = tuple(stages) or stages_of_rank(config.num_layers, pp=1, chunks=1, pp_rank=0)
        is_first, is_last = self.stages[0].is_first, self.stages[-1].is_last
        is_tied = not config.untie_embeddings_and_output_weights
        self.word_embedding = parts.word_embedding() if is_first or (is_last and is_tied) else None
        if self.word_embedding is not None and is_tied and not (is_first and is_last):
            assert pp_ends is not None, "the other stage holds the tied embedding as well"
            self.word_embedding.copies = pp_ends
        self.position_embedding = parts.position_embedding() if is_first else None
        self.embedding_dropout = parts.dropout()
        # A list whose members are called by their numbers in the whole model.
        self.blocks = nn.ModuleList()
        for layer in (layer for stage in self.stages for layer in stage.layers):
            self.blocks.add_module(str(layer), parts.block())
        self.final_norm = parts.final_norm() if is_last else nn.Identity()
        self.head = parts.head() if is_last else None
        self.vocabulary = parts.vocabulary()
        self._drops = config.hidden_dropout > 0 or config.attention_dropout > 0

    @property
    def output_weight(self) -> torch.Tensor:
        """The weight of the output layer, [v/t, h]: the word embedding's, or its own."""
        holder = self.word_embedding if self.head is None else self.head
        assert holder is not None, "the last stage holds the output layer"
        return holder.weight

    def states_shape(self, num_samples: int, num_positions: int) -> tuple[int, int, int]:
        """Return the shape of the activations between layers on this rank, [s, b, h] outside the regions."""
        return (self.boundary.local_length(num_positions), num_samples, self.config.hidden_size)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what enters the first layer. tokens [b, s] replicated -> [s, b, h] outside the regions.

        Raises:
            ValueError: The sequence is longer than there are positions, or cannot be split over the ranks.
        """
        num_positions = tokens.shape[1]
        if num_positions > self.config.max_position_embeddings:
            raise ValueError(
                f"a sequence of {num_positions} tokens, but --max-position-embeddings is "
                f"{self.config.max_position_embeddings}"
            )
        assert self.word_embedding is not None, "the first stage holds the embedding"
        x = self.word_embedding(tokens.t())
        if self.position_embedding is not None:
            x = x + self.position_embedding(num_positions)
        return self.embedding_dropout(x)

    def run_layers(self, x: torch.Tensor, layers: Iterable[int]) -> torch.Tensor:
        """Return x [s, b, h] after the layers of the given numbers, which this rank must hold."""
        recomputes = self.recompute_blocks and torch.is_grad_enabled()
        for layer in layers:
            block = self.blocks.get_submodule(str(layer))
            if self._drops and self.training:
                self.streams.start_layer(layer)
            x = recompute(block, self.streams, x) if recomputes else block(x)
        return x

    def loss(
        self, x: torch.Tensor, targets: torch.Tensor, loss_weights: torch.Tensor, gradient_scale: float = 1.0
    ) -> torch.Tensor:
        """Return `forward`'s sum of losses from what the last layer put out, x [s, b, h] outside the regions."""
        x = self.boundary.enter(self.final_norm(x))
        return linear_cross_entropy(
            x.reshape(-1, x.shape[-1]),
            self.output_weight,
            targets.t().reshape(-1),
            loss_weights.t().reshape(-1),
            self.vocabulary,
            self.label_smoothing if self.training else 0.0,
            gradient_scale,
        )

    def hidden_states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the final normed states. tokens [b, s] replicated -> [s, b, h] outside the regions: see `boundary`.

        Raises:
            ValueError: The sequence is longer than there are positions, or cannot be split over the ranks.
        """
        return self.final_norm(self.run_layers(self.embed(tokens), range(self.config.num_layers)))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the logits. tokens [b, s] replicated -> [b, s, v/t] split on the last dim.

        The last columns of the last rank are padding (see `self.vocabulary`); their values mean nothing.
        """
        x = self.boundary.enter(self.hidden_states(tokens))
        return F.linear(x, self.output_weight).transpose(0, 1)

    def token_losses(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return each position's loss in nats, without label smoothing. tokens, targets [b, s] -> [b, s] replicated."""
        return vocab_parallel_cross_entropy(self.logits(tokens), targets, self.vocabulary)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, loss_weights: torch.Tensor, gradient_scale: float = 1.0
    ) -> torch.Tensor:
        """Return the weighted sum of the positions' losses, scalar float64, replicated over the tensor axis.

        tokens, targets, loss_weights [b, s] replicated; see `linear_cross_entropy` for `gradient_scale`. Label
        smoothing applies in training mode only.
        """
        states = self.run_layers(self.embed(tokens), range(self.config.num_layers))
        return self.loss(states, targets, loss_weights, gradient_scale)
