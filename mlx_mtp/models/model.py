"""A loaded model as the engine sees it: a target model, perhaps an MTP head, and their caches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_mtp.cache.batch import BatchCache
from mlx_mtp.cache.packing import ImageRows, Pass
from mlx_mtp.cache.specs import AttentionSpec, LayerSpec
from mlx_mtp.distributed import all_gather
from mlx_mtp.errors import ModelError, UsageError
from mlx_mtp.kernels.attention import is_batch_invariant
from mlx_mtp.kernels.gpu import LONGEST_WINDOW, backend, decode_pass, refused
from mlx_mtp.models.family import Family, text_config
from mlx_mtp.models.gemm.measure import all_routable, choose_routes, kernel_takes_all_weights
from mlx_mtp.models.head import MTPHead
from mlx_mtp.progress import Bar
from mlx_mtp.vision.tower import VisionTower


@dataclass(frozen=True)
class LoadedModel:
    """The patched mlx-lm model and the contents of its configuration files."""

    path: Path
    config: dict[str, Any]  # config.json
    generation_config: dict[str, Any]  # generation_config.json, empty if there is none
    model: nn.Module  # its item `mtp` is the MTP head, if one was loaded
    family: Family
    head_source: str | None  # files that the MTP head was read from; None without a head
    num_ranks: int = 1  # tensor-parallel ranks; this model has one rank's slice of the weights
    tower: VisionTower | None = None  # None: the model takes no images

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def max_model_len(self) -> int:
        return int(text_config(self.config).get("max_position_embeddings") or 4096)

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding, padding rows included."""
        return int(self.causal_lm.args.vocab_size)

    @cached_property
    def dtype(self) -> mx.Dtype:
        return self.causal_lm.model.norm.weight.dtype

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence, from generation_config.json, else from config.json."""
        sources = (self.generation_config, self.config, text_config(self.config))
        values = [source.get("eos_token_id") for source in sources]
        lists = (v if isinstance(v, list) else [v] for v in values if v is not None)
        return next((tuple(ids) for ids in lists if ids), ())

    @cached_property
    def image_token_ids(self) -> tuple[int, ...]:
        """Ids that mark images and videos in prompts, `image_token_id` first; () without a tower.

        These ids are never sampled.
        """
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        ids = [self.config[name] for name in names if type(self.config.get(name)) is int]
        return () if self.tower is None else tuple(n for n in ids if 0 <= n < self.vocab_size)

    @cached_property
    def causal_lm(self) -> nn.Module:
        return self.family.causal_lm(self.model)

    @property
    def output_layer(self) -> nn.Module:
        tied = self.causal_lm.args.tie_word_embeddings
        return self.causal_lm.model.embed_tokens if tied else self.causal_lm.lm_head

    @property
    def head(self) -> MTPHead | None:
        return None if self.head_source is None else self.model.get("mtp")

    @cached_property
    def layer_specs(self) -> list[LayerSpec]:
        specs = self.family.layer_specs(self.causal_lm.args)
        return [spec.part(self.num_ranks) for spec in specs]

    def nbytes(self) -> tuple[int, int]:
        """Returns the bytes of the target model's weights and of the head's. No weight is read."""
        of_head = 0 if self.head is None else module_nbytes(self.head)
        return module_nbytes(self.model) - of_head, of_head

    @property
    def tower_nbytes(self) -> int:
        """Bytes of the vision tower's weights. No weight is read."""
        return 0 if self.tower is None else module_nbytes(self.tower)

    def row_nbytes(self) -> int:
        """Returns the bytes of one token's row of lm_head. No weight is read."""
        parameters = tree_flatten(self.output_layer.parameters())
        return sum(value.nbytes // value.shape[0] for _, value in parameters)

    def check_eos_token_ids(self) -> None:
        """Raise ModelError if an EOS id is not in the vocabulary."""
        for token in self.eos_token_ids:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise ModelError(
                    f"{self.path}: eos_token_id names {token!r}, but this model's token ids "
                    f"are 0 to {self.vocab_size - 1}."
                )

    def load_weights(self) -> None:
        """Read the weights, and choose the operation for each matrix product (`choose_routes`).

        Raises UsageError if this machine can't compute in the weights' dtype.
        """
        if mx.default_device() == mx.cpu:
            for name, value in tree_flatten(self.model.parameters()):
                if ".switch_mlp." in name and value.dtype in (mx.bfloat16, mx.float16):
                    dtype = str(value.dtype).rpartition(".")[2]
                    raise UsageError(
                        f"--dtype {dtype} can't be used here: on the CPU mlx runs a mixture of "
                        "experts only in float32. Use --dtype float32 or auto."
                    )
        # A scaled RoPE's frequencies are not parameters, and a lazy array can be evaluated only on
        # the thread that made it. So the modules' whole state is evaluated below.
        modules = [self.model] if self.tower is None else [self.model, self.tower]
        weights = [a for module in modules for _, a in tree_flatten(module.parameters())]
        with Bar(desc="Loading the weights", total=sum(array.nbytes for array in weights)) as bar:
            for array in weights:
                mx.eval(array)
                bar.update(array.nbytes)
        del weights, array  # `choose_routes` replaces arrays.
        mx.eval(*(module.state for module in modules))
        choose_routes(self.model, self.dtype)

    def without_head(self) -> LoadedModel:
        return replace(self, head_source=None)

    @property
    def can_be_exact(self) -> bool:
        """True if exact mode is possible: a token's bits then depend on its own sequence alone."""
        attention = [spec for spec in self.layer_specs if isinstance(spec, AttentionSpec)]
        alone = backend() is not None and self.num_ranks == 1 and self.dtype != mx.float32
        alone = alone and all_routable(self.model)
        return alone and all(is_batch_invariant(spec.head_dim) for spec in attention)

    def resolve_exact(self, exact: bool | None = None) -> bool:
        """Returns `exact` if set, else whether it is possible and kernels serve all products.

        On Metal `calibration.exactness` also measures what exact mode costs.
        """
        return (
            self.can_be_exact and kernel_takes_all_weights(self.model, self.dtype)
            if exact is None
            else exact
        )

    @property
    def unused_kernels(self) -> list[str]:
        """Names of kernels that were tried on this machine and failed."""
        return sorted(name.replace("_", " ") for name in refused)

    def make_cache(self, num_rows: int) -> BatchCache:
        return BatchCache.of(self.layer_specs, num_rows, self.dtype)

    def hidden(self, tokens: mx.array, *caches: BatchCache) -> mx.array:
        """Returns post-norm hidden states [N, H] of token ids [N]; call each cache's `begin_window`
        first. `tokens` are those of the first cache, then of the second, and so on.
        """
        trunk = self.causal_lm.model
        packings = [cache.window for cache in caches]
        x = self.embed(tokens, packings[0].images)  # A chunk with images has a pass of its own.
        normed = trunk.layers[0].input_layernorm(x)
        where = Pass.of(packings)
        by_layer = zip(*(cache.layers for cache in caches), strict=True)
        is_step = all(packing.longest <= LONGEST_WINDOW for packing in packings)
        with decode_pass(is_step):
            if backend() is None:
                for layer, mine, norm in zip(trunk.layers, by_layer, self._next_norms):
                    x, normed = layer.forward(x, normed, norm, where, mine)
                    mx.async_eval(x, normed)
                return normed
            mixed: Sequence[mx.array] = ()
            for span in self.family.spans(self.model):
                own = [*itertools.islice(by_layer, span.num_caches)]
                x, normed, mixed = span.forward(x, normed, mixed, where, own)
                if not is_step:
                    mx.async_eval(x, normed, mixed)
        return normed

    @cached_property
    def _next_norms(self) -> list[mx.array]:
        """The weight of the norm that follows each layer."""
        return [norm.weight for norm in self.family.next_norms(self.model)]

    def logits(self, hidden: mx.array, layer: nn.Module | None = None) -> mx.array:
        """Returns logits [.., V] of post-norm states [.., H].

        `layer` replaces lm_head (see `DraftVocabulary`).
        """
        head = self.output_layer if layer is None else layer
        with decode_pass():
            if hasattr(head, "as_linear"):  # tied to the embedding, which is whole on each rank
                return head.as_linear(hidden)
            logits = head(hidden)
        return all_gather(logits) if layer is None else logits

    def embed(self, tokens: mx.array, images: ImageRows | None = None) -> mx.array:
        """Returns embeddings [N, H] of ids [N]; ids from `images.first` on select image rows."""
        if images is None or images.rows is None:
            return self._embedded(tokens)
        place = tokens - images.first
        embedded = self._embedded(mx.where(place < 0, tokens, 0))
        rows = images.rows[mx.maximum(place, 0)].astype(embedded.dtype)
        return mx.where((place < 0)[:, None], embedded, rows)

    def _embedded(self, tokens: mx.array) -> mx.array:
        # Models packed with a Hadamard rotation have float16 embeddings, whatever their dtype is.
        return self.causal_lm.model.embed_tokens(tokens).astype(self.dtype)


class DraftVocabulary:
    """The rows of lm_head for a reduced draft vocabulary, copied in their storage format.

    Most of a draft's cost is lm_head over the whole vocabulary, but most tokens hardly ever occur
    (FR-Spec, arXiv:2502.14856). `layer` maps [.., H] to logits [.., N] of the tokens `ids`.
    Raises ModelError if rows can't be taken from lm_head.
    """

    def __init__(self, model: LoadedModel, ids: Sequence[int]) -> None:
        # int32 [N], ascending: among equal logits the same token wins as in the full vocabulary.
        self.ids = mx.array(sorted(ids), dtype=mx.int32)
        layer, vocab_size = model.output_layer, model.vocab_size
        # A shallow copy: replacing its arrays leaves the model's own layer as it was.
        self.layer = copy.copy(layer)
        for name, value in tree_flatten(layer.parameters()):
            if value.ndim and value.shape[0] * model.num_ranks == vocab_size:
                value = all_gather(value.T).T  # Each rank has the rows of some tokens.
            if "." in name or value.ndim == 0 or value.shape[0] != vocab_size:
                raise ModelError(
                    f"No rows can be taken from lm_head: its {name} is {list(value.shape)} and not "
                    f"{vocab_size} rows. Draft without --mtp-draft-vocab."
                )
            self.layer[name] = value[self.ids]
            mx.eval(self.ids, self.layer[name])  # else every step would copy the rows again


def module_nbytes(module: nn.Module) -> int:
    """Returns the bytes of a module's parameters, without reading them."""
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))
