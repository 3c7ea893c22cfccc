"""The parts of a GPT as its configuration chooses them: the one place where model options become modules.

`GPT` puts them together; a pipeline stage takes those it holds. Every part is declared under the name of the attribute
that it is assigned to, so names, and with them initial values and checkpoints, are the same wherever it is built.

Legend: h hidden, a attention heads, g groups of them, d head dim, f inner features of the MLP, t tensor-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import nn

from megascale.config.accounting import num_query_groups, num_query_key_value_features, padded_vocab_size
from megascale.config.schema import ModelConfig
from megascale.model.activations import gelu, relu, swiglu
from megascale.model.attention import AttentionCore, CausalSelfAttention
from megascale.model.block import PostNormBlock, TransformerBlock
from megascale.model.grouped_query import GroupedQueryAttention, GroupedQueryCore
from megascale.model.mlp import MLP
from megascale.model.rotary import Rotary, RotaryCore
from megascale.parallel.boundary import Boundary
from megascale.parallel.context import Axis
from megascale.parallel.cross_entropy import VocabularySlice
from megascale.parallel.gated_linear import GatedColumnParallelLinear
from megascale.parallel.layers import (
    ColumnParallelLinear,
    LayerNorm,
    PositionEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from megascale.parallel.random import RandomStreams
from megascale.parallel.recompute import Recomputed
from megascale.parallel.rms_norm import RMSNorm

_NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
_BLOCKS = {"pre": TransformerBlock, "post": PostNormBlock}
_ColumnParallel = type[ColumnParallelLinear] | type[GatedColumnParallelLinear]
# Each activation with the product that feeds it.
_MLPS: Mapping[str, tuple[_ColumnParallel, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": (ColumnParallelLinear, gelu),
    "relu": (ColumnParallelLinear, relu),
    "swiglu": (GatedColumnParallelLinear, swiglu),
}


class ModelParts:
    """Builds the parts of one model. Parameters are left uninitialised: see `parallel.sharding.initialise`.

    Args:
        config: The model section of a resolved configuration (sizes set, vocabulary known).
        axis: The tensor axis.
        streams: The dropout streams of this rank.
        dtype, device: Of the parameters.
        boundary: How activations lie outside the tensor-parallel regions; None: replicated.
        recompute_core: Whether what attention saves between its projections is recomputed in the backward pass.

    Raises:
        ValueError: Heads or groups cannot be dealt to the ranks evenly.
    """

    def __init__(
        self,
        config: ModelConfig,
        axis: Axis,
        streams: RandomStreams,
        dtype: torch.dtype,
        device: torch.device,
        boundary: Boundary | None = None,
        recompute_core: bool = False,
    ) -> None:
        sizes = (config.ffn_hidden_size, config.max_position_embeddings, config.vocab_size)
        assert None not in sizes, "the configuration is resolved"
        heads, groups = config.num_attention_heads, num_query_groups(config)
        if config.hidden_size % heads or heads % axis.size:
            raise ValueError(
                f"hidden size {config.hidden_size} must divide into {heads} heads, and those over {axis.size} ranks"
            )
        if heads % groups or groups % axis.size:
            raise ValueError(f"{heads} heads must divide into {groups} query groups, and those over {axis.size} ranks")
        self.config, self.axis, self.streams, self.dtype, self.device = config, axis, streams, dtype, device
        self.boundary = boundary or Boundary(axis)
        self.recompute_core = recompute_core
        self._num_rows = padded_vocab_size(config.vocab_size, config.make_vocab_size_divisible_by)
        self._std = config.init_method_std
        # Weights that write into the residual stream start smaller by sqrt(2L) (Radford et al. 2019, section 2.3).
        self._output_std = config.init_method_std / math.sqrt(2.0 * config.num_layers)

    def word_embedding(self) -> VocabParallelEmbedding:
        """Return the table of word vectors."""
        h = self.config.hidden_size
        return VocabParallelEmbedding(self._num_rows, h, self.axis, self._std, self.dtype, self.device, self.boundary)

    def position_embedding(self) -> PositionEmbedding | None:
        """Return the table of learned positions; None where positions enter in attention."""
        if self.config.position_embedding_type != "learned_absolute":
            return None
        h, rows = self.config.hidden_size, self.config.max_position_embeddings
        return PositionEmbedding(rows, h, self.axis, self._std, self.dtype, self.device, self.boundary)

    def dropout(self) -> nn.Module:
        """Return the dropout of the embedding and of the residual branches."""
        return self.boundary.dropout(self.config.hidden_dropout)

    def block(self) -> nn.Module:
        """Return one transformer layer, [s, b, h] -> [s, b, h] outside the regions."""
        return _BLOCKS[self.config.norm_position](
            self.norm(), self.attention(), self.norm(), self.mlp(), self.dropout()
        )

    def norm(self) -> nn.Module:
        """Return one norm over h."""
        config = self.config
        norm = _NORMS[config.normalization]
        return norm(config.hidden_size, self.axis, config.layernorm_epsilon, self.dtype, self.device, self.boundary)

    def final_norm(self) -> nn.Module:
        """Return the norm after the last block: none, where each block ends with one."""
        return self.norm() if self.config.norm_position == "pre" else nn.Identity()

    def attention(self) -> CausalSelfAttention:
        """Return causal self-attention over this rank's heads."""
        config, t = self.config, self.axis.size
        qkv = self._column_parallel(num_query_key_value_features(config))
        output = self._row_parallel(config.hidden_size)
        core, heads, d = self._attention_core(), config.num_attention_heads // t, self._head_dim
        if self._shares_keys:
            return GroupedQueryAttention(qkv, core, output, heads, num_query_groups(config) // t, d)
        return CausalSelfAttention(qkv, core, output, heads, d)

    def mlp(self) -> MLP:
        """Return the feed-forward part of a block."""
        up, activation = _MLPS[self.config.activation]
        f = self.config.ffn_hidden_size
        return MLP(self._column_parallel(f, up), self._row_parallel(f), activation)

    def head(self) -> VocabParallelHead | None:
        """Return the output layer's own weight; None where it is the word embedding's."""
        if not self.config.untie_embeddings_and_output_weights:
            return None
        h = self.config.hidden_size
        return VocabParallelHead(self._num_rows, h, self.axis, self._std, self.dtype, self.device)

    def vocabulary(self) -> VocabularySlice:
        """Return which rows of the vocabulary this rank holds."""
        return VocabularySlice(self.axis, self.config.vocab_size, self._num_rows // self.axis.size)

    @property
    def _head_dim(self) -> int:
        return self.config.hidden_size // self.config.num_attention_heads

    @property
    def _shares_keys(self) -> bool:
        return num_query_groups(self.config) < self.config.num_attention_heads

    @cached_property
    def _rotary(self) -> Rotary:
        # One table for all layers.
        config = self.config
        return Rotary(self._head_dim, config.max_position_embeddings, config.rotary_base, self.dtype, self.device)

    def _attention_core(self) -> nn.Module:
        core_type = GroupedQueryCore if self._shares_keys else AttentionCore
        core: nn.Module = core_type(self.config.attention_dropout, self.streams)
        if self.config.position_embedding_type == "rope":
            core = RotaryCore(self._rotary, core)
        return Recomputed(core, self.streams) if self.recompute_core else core

    def _column_parallel(
        self,
        num_outputs: int,
        layer: _ColumnParallel = ColumnParallelLinear,
    ) -> nn.Module:
        h, bias = self.config.hidden_size, not self.config.disable_bias_linear
        return layer(h, num_outputs, self.axis, self._std, self.dtype, self.device, self.boundary, bias)

    def _row_parallel(self, num_inputs: int) -> RowParallelLinear:
        h, bias = self.config.hidden_size, not self.config.disable_bias_linear
        return RowParallelLinear(
            num_inputs, h, self.axis, self._output_std, self.dtype, self.device, self.boundary, bias
        )
