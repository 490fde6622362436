"""The lowering of an executor's programs from the shapes of their arguments.

A program depends on no value of a weight. Weights of the same shapes may replace the weights, and a program
may be lowered before the weights are loaded.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxflow.engine.expert_slots import expert_arrays
from jaxflow.engine.layered_step import LoweredStep, lower_layers
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.lowered_cache import Kept, LoweredPrograms
from jaxflow.engine.programs import FULL_DONATES, REPLICATED, STEP_DONATES, Programs, Rows, head, prompt_head
from jaxflow.kv.device_cache import cache_shapes, cache_spec, page_groups
from jaxflow.model.expert_copies import EXPERT_OF_SLOT, has_copies
from jaxflow.model.expert_tokens import mixture_layers
from jaxflow.model.ops import head_table
from jaxflow.model.slot_params import empty_slots, slot_values
from jaxflow.parallel.expert_moves import move_slots
from jaxflow.parallel.mesh import TP, by_rank, ranks_of

APPENDS = 4096  # page-table entries that one `append_pages` call takes
COUNTED = 4096  # tokens that one `count_tokens` call takes


class ProgramLowering:
    """Lowers the programs of one executor.

    Attributes:
      forward_of: returns the function that the step of a layout traces.
      is_layered: returns True if a layout's step is a program a layer.
      weight_shapes: the shapes, dtypes and shardings of the weights.
      slots, groups, page_size, pages_per_sequence: of one data-parallel rank.
      page_groups: the layer groups of the executor's stage. own_groups: their
        numbers among the model's groups.
      lowered: programs of earlier starts; None: every program is traced and lowered.
    """

    def __init__(
        self,
        programs: Programs,
        weights: dict,
        layout: StepLayout,
        forward_of: Callable[[StepLayout], Callable],
        is_layered: Callable[[StepLayout], bool],
        *,
        kv_dtype: Any,
        max_model_len: int,
        lowered: LoweredPrograms | None,
        name: str,
    ):
        """Arguments not in the class's description:

        weights: arrays, or their shapes. layout: any layout of the executor.
        name: see `Executor`.
        """
        self.programs, self._name = programs, name
        self.weight_shapes: dict = jax.tree.map(_shape_of, weights)
        self.forward_of, self.is_layered, self.lowered = forward_of, is_layered, lowered
        self.slots, self.groups, self.page_size = layout.slots, layout.groups, layout.page_size
        self.pages_per_sequence = -(-max_model_len // layout.page_size)
        self.page_groups = page_groups(programs.context.config, kv_dtype, programs.mesh.shape[TP])
        windows = programs.context.windows or programs.context.config.windows
        self.own_groups = [windows.index(group.window) for group in self.page_groups]
        self.ranks = ranks_of(programs.mesh)
        self.head = head(self.weight_shapes) if programs.samples else {}

    # ---- shapes

    @property
    def dtype(self) -> Any:
        """Return the dtype of the residual stream."""
        return self.weight_shapes["layers"][0]["attn_norm"].dtype

    @property
    def mask_words(self) -> int:
        """Return the words of a row's mask: a bit for each token of the vocabulary."""
        return -(-self.programs.context.config.vocab_size // 32)

    @property
    def moves_experts(self) -> bool:
        """Return True for a model with experts in slots."""
        return any(map(has_copies, self.weight_shapes["layers"]))

    def hidden(self, rows: int) -> jax.ShapeDtypeStruct:
        """Return the shape of the residual stream of some rows, on the devices."""
        return self._of_ranks((rows, self.programs.context.config.hidden_size), self.dtype)

    def own_pages(self, num_pages: tuple[int, ...]) -> list[int]:
        """Return the pages of the stage's layer groups, from those of the model's groups."""
        return [num_pages[group] for group in self.own_groups]

    def pages_of_ranks(self, num_pages: tuple[int, ...]) -> list[int]:
        """Return the pages of `own_pages`, of all ranks together."""
        return [self.ranks * pages for pages in self.own_pages(num_pages)]

    def empty_slots(self, ranks: int = 1) -> tuple[Any, Any]:
        """Return the sampling settings and the token counts of ranks' empty slots; ()
        in a stage that does not sample.
        """
        if not self.programs.samples:
            return (), ()
        return empty_slots(ranks * self.slots, head_table(self.head).shape[0])

    def state(self, num_pages: tuple[int, ...]) -> tuple:
        """Return the shapes of (kv, page_table, last_tokens)."""
        mesh = self.programs.mesh
        cache = cache_shapes(self.page_groups, self.pages_of_ranks(num_pages), self.page_size)
        cache = jax.tree.map(lambda a: self._abstract(a.shape, a.dtype, cache_spec(mesh)), cache)
        table = self._of_ranks((self.groups, self.slots, self.pages_per_sequence), jnp.int32)
        return cache, table, self._of_ranks((self.slots,), jnp.int32)

    def step_arguments(self, layout: StepLayout, num_pages: tuple[int, ...]) -> tuple:
        """Return the shapes of the arguments of `Programs.step`."""
        kv, table, last_tokens = self.state(num_pages)
        source = last_tokens if self.programs.embeds else self.hidden(layout.tokens)
        buffer = self._of_ranks((layout.size,), jnp.int32)
        counts = [self._of_ranks(count.shape, count.dtype) for count in self.programs.expert_counts]
        return self.weight_shapes, kv, table, source, buffer, *counts

    def _slots(self) -> tuple[Any, Any]:
        """Return the shapes of (params, counts), in a stage that samples."""
        slots = jax.eval_shape(self.empty_slots)
        return jax.tree.map(lambda a: self._of_ranks(a.shape, a.dtype), slots)

    def _of_ranks(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """Return the arrays of all ranks on the devices. shape: of one rank's array."""
        return self._abstract((self.ranks * shape[0], *shape[1:]), dtype, by_rank(self.programs.mesh))

    def _abstract(
        self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = REPLICATED
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.programs.mesh, spec))

    # ---- programs

    def step(
        self,
        layout: StepLayout,
        num_pages: tuple[int, ...],
        begin: Callable[[Any], Any] = lambda lowered: lowered,
    ) -> jax.stages.Lowered | Kept | LoweredStep:
        """Return the lowered step of a layout, as one program or as several.

        begin: see `jaxflow.engine.program_compiler.Job`.
        """
        if not self.is_layered(layout):
            return self.whole_step(layout, num_pages)

        def lower(
            name: str, fn: jax.stages.Wrapped, donated: tuple[int, ...], *args: Any
        ) -> Any:  # a CPU's programs have no machine code of other processes
            return begin(self._lower(f"{name} of {layout}{self._name}", fn, donated, *args))

        return lower_layers(self.programs, layout, lower, *self.step_arguments(layout, num_pages))

    def whole_step(self, layout: StepLayout, num_pages: tuple[int, ...]) -> jax.stages.Lowered | Kept:
        """Return the lowered step of a layout as one program."""
        fn = self.programs.step(layout, self.forward_of(layout))
        args = self.step_arguments(layout, num_pages)
        return self._lower(f"step {layout}{self._name}", fn, STEP_DONATES, *args)

    def sampler(self, rows: int, kind: str) -> jax.stages.Lowered | Kept:
        """Return the lowered sampler of some rows. kind: "plain", "full" or "masked"."""

        def vector(dtype: Any, *more: int) -> Any:
            return self._of_ranks((rows, *more), dtype)

        row = Rows(
            vector(jnp.int32),
            vector(jnp.int32),
            vector(jnp.int32),
            vector(jnp.float32),
            vector(jnp.uint32, 2),
        )
        last = self._of_ranks((self.slots,), jnp.int32)
        if kind == "plain":
            fn = self.programs.sample_plain()
            return self._lower(kind, fn, (), self.head, self.hidden(rows), row, last)
        more = (vector(jnp.int32, self.mask_words),) if kind == "masked" else ()
        fn = self.programs.sample_full(masked=bool(more))
        arguments = self.head, self.hidden(rows), row, last, *self._slots(), *more
        return self._lower(kind, fn, FULL_DONATES, *arguments)

    def prompt(self, tokens: int) -> jax.stages.Lowered | Kept:
        """Return the lowered prompt log-probabilities of a step's tokens."""
        targets = self._of_ranks((tokens,), jnp.int32)
        arguments = prompt_head(self.weight_shapes), self.hidden(tokens), targets
        return self._lower("prompt", self.programs.prompt_logprobs(), (), *arguments)

    def append_pages(self, num_pages: tuple[int, ...]) -> jax.stages.Lowered | Kept:
        """Return the lowered `Programs.append_pages`."""
        appends = self._of_ranks((APPENDS, 4), jnp.int32)
        _, table, _ = self.state(num_pages)
        return self._lower_small("append_pages", self.programs.append_pages(), (0,), table, appends)

    def move_experts(self) -> jax.stages.Lowered | Kept:
        """Return the lowered `move_slots`, of a model with experts in slots."""
        first, *_ = mixture_layers(self.programs.context.config)
        own = expert_arrays(self.weight_shapes["layers"][first])
        specs = expert_arrays(self.programs.weight_specs["layers"][first])
        source = self._abstract(self.weight_shapes["layers"][first][EXPERT_OF_SLOT].shape, jnp.int32)
        return self._lower_small("move_experts", move_slots(self.programs.mesh, specs), (), own, source)

    def set_slot(self) -> jax.stages.Lowered | Kept:
        """Return the lowered `Programs.set_slot`."""
        values = jax.tree.map(lambda a: self._abstract(np.shape(a), jnp.result_type(a)), slot_values())
        arguments = *self._slots(), self._abstract((), jnp.int32), values
        return self._lower_small("set_slot", self.programs.set_slot(), (0, 1), *arguments)

    def count_tokens(self) -> jax.stages.Lowered | Kept:
        """Return the lowered `Programs.count_tokens`."""
        ids, outputs = self._abstract((COUNTED,), jnp.int32), self._abstract((COUNTED,), jnp.bool_)
        arguments = self._slots()[1], self._abstract((), jnp.int32), ids, outputs
        return self._lower_small("count_tokens", self.programs.count_tokens(), (0,), *arguments)

    def _lower(
        self, name: str, fn: jax.stages.Wrapped, donated: tuple[int, ...], *args: Any
    ) -> jax.stages.Lowered | Kept:
        return fn.lower(*args) if self.lowered is None else self.lowered.lower(name, fn, donated, *args)

    def _lower_small(
        self, name: str, fn: jax.stages.Wrapped, donated: tuple[int, ...], *args: Any
    ) -> jax.stages.Lowered | Kept:
        """Lower a `small` program. No process compiles it, so the folder never has its machine code."""
        if self.lowered is None:
            return fn.lower(*args)
        return dataclasses.replace(self.lowered, target=None).lower(name, fn, donated, *args)


def _shape_of(array: Any) -> jax.ShapeDtypeStruct:
    weak = getattr(array, "weak_type", False)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding, weak_type=weak)
