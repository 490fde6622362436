"""The owner of the weights and the KV cache on the device, which runs compiled steps.

An executor runs a model, or one pipeline stage of a model (`jaxflow.engine.staged_executor`).

All that a plain request needs is compiled before the first request. `warm_up` compiles one forward for each
token bucket and each of its plans, two samplers for each number of rows, and a few small programs. On a CPU
the full samplers, the prompt log-probabilities and some steps of a deep model are compiled on a thread, soon
after the start, or by the first request that needs one. On a GPU most layouts become ready while the engine
serves (`jaxflow.engine.first_layouts`). No shape of a request causes another compilation. `run` returns as
soon as the step is enqueued.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxflow.engine.deferred import DELAY_S, DeferredProgram, compile_in_background, while_it_lives
from jaxflow.engine.expert_balancer import MovedLayer
from jaxflow.engine.expert_slots import expert_arrays, placed_experts, source_slots
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.lowered_cache import LoweredPrograms
from jaxflow.engine.program_compiler import ProgramCompiler
from jaxflow.engine.program_lowering import APPENDS, COUNTED, ProgramLowering
from jaxflow.engine.programs import REPLICATED, Programs, Rows, head, prompt_head
from jaxflow.engine.recorder import Recorder
from jaxflow.engine.rehearsal import rehearse, rehearsed
from jaxflow.engine.start_times import StartTimes, num_compiled
from jaxflow.kv.device_cache import make_cache
from jaxflow.kv.tiers.page_copies import PageCopies
from jaxflow.kv.tiers.rank_copies import RankCopies
from jaxflow.model.expert_copies import copy_map
from jaxflow.model.expert_tokens import mixture_layers
from jaxflow.model.logprobs import LogprobsOut
from jaxflow.model.slot_params import NO_TOKEN, SlotParams, slot_values
from jaxflow.parallel.mesh import by_rank, is_here, place


@dataclasses.dataclass(frozen=True)
class Pending:
    """The results of an enqueued step. Reading an array waits for the device."""

    tokens: jax.Array  # [R] int32
    logprobs: LogprobsOut | None  # of the sampled tokens, if the full sampler ran
    prompt: LogprobsOut | None  # of all T tokens, if prompt log-probabilities were requested
    enqueued_s: float
    # The tokens at each expert after the step, [mixture layers, E] uint32, one
    # array a stage with mixture layers.
    expert_counts: tuple[jax.Array, ...] = ()


class Executor:
    """The steps of one model on one mesh. Not thread-safe: only the engine's thread uses it.

    Data-parallel ranks run each step together. Arrays of all ranks are the ranks'
    arrays, one after another on axis 0.

    Attributes:
      slots, groups, num_pages: of one rank.
      ranks: the number of data-parallel ranks.
      name: of the pipeline stage, in the names of its programs; "" without stages.
      recorder: takes the calls that other processes replay; None in an engine of one process.
      lower, compiler: lower and compile the programs.
      layouts, decode_layouts: see `ProgramCompiler`.
    """

    num_stages = 1

    def __init__(
        self,
        programs: Programs,
        weights: dict,
        layouts: Iterable[StepLayout],
        forward_of: Callable[[StepLayout], Callable],
        *,
        kv_dtype,
        max_model_len: int,
        options_of: Callable[[StepLayout], dict[str, Any]] = lambda layout: {},
        options: Mapping[str, Any] = MappingProxyType({}),
        lowered: LoweredPrograms | None = None,
        name: str = "",
        defers: bool = False,
        is_layered: Callable[[StepLayout], bool] = lambda layout: False,
        eager: bool = False,
        times: StartTimes | None = None,
    ):
        """Arguments not in the class's description:

        options: XLA's, of all programs but steps. options_of: those of a step.
        defers: compile the programs that plain requests do not need after the start, see `DeferredProgram`.
        is_layered: returns True if a layout's step is a program a layer, see `LayeredStep`.
        eager: compile the Mosaic kernels of a program side by side before XLA compiles the program, and the
          full sampler first, because it takes longest.
        times: takes the times of `warm_up`.
        """
        self._times = times or StartTimes()
        self.programs, self.name = programs, name
        self.take_weights(weights)
        layouts = tuple(layouts)
        any_layout = layouts[0]
        self.lower = ProgramLowering(
            programs,
            weights,
            any_layout,
            forward_of,
            is_layered,
            kv_dtype=kv_dtype,
            max_model_len=max_model_len,
            lowered=lowered,
            name=name,
        )
        self.compiler = ProgramCompiler(
            self.lower,
            layouts,
            options=options,
            options_of=options_of,
            name=name,
            defers=defers,
            eager=eager,
            times=self._times,
        )
        self.layouts, self.decode_layouts = self.compiler.layouts, self.compiler.decode_layouts
        self.slots, self.page_size, self.groups = any_layout.slots, any_layout.page_size, any_layout.groups
        self.pages_per_sequence, self.mask_words = self.lower.pages_per_sequence, self.lower.mask_words
        self.page_groups, self.own_groups = self.lower.page_groups, self.lower.own_groups
        self.replicated, self.ranks = NamedSharding(programs.mesh, REPLICATED), self.lower.ranks
        self._by_rank = NamedSharding(programs.mesh, by_rank(programs.mesh))
        self._masks_lock, self._masks_asked = threading.Lock(), False
        self.recorder: Recorder | None = None
        self.copies: PageCopies | RankCopies | None = None
        self._warm = False
        self._compiled_at_warm_up = 0

    @property
    def expert_layers(self) -> list[int]:
        """Return the layer of each row of `Pending.expert_counts`."""
        return mixture_layers(self.programs.context.config)

    @property
    def is_here(self) -> bool:
        """Return True if this process has devices of the executor.

        Otherwise the weights are shapes, and nothing runs.
        """
        return is_here(self.programs.mesh)

    @property
    def own_num_pages(self) -> tuple[int, ...]:
        """Return the pages of each of this stage's layer groups, once they are allocated."""
        return tuple(self.lower.own_pages(self.num_pages))

    # ---- before serving

    def take_weights(self, weights: dict) -> None:
        """Set the weights: arrays, or the shapes of arrays to come. Compiled programs
        run on arrays of the same shapes.
        """
        self.weights = weights
        # The expert of each slot in each mixture layer, [L, S]; None for experts without copies.
        self.placed = placed_experts(weights)
        self._head = head(weights) if self.programs.samples else {}
        self._prompt_head = prompt_head(weights)

    def state_bytes(self) -> int:
        """Return the device memory of the page tables, the sampling settings and the token counts."""
        sampling = jax.eval_shape(self.lower.empty_slots)
        table = self.groups * self.slots * self.pages_per_sequence * 4
        state = sampling, self.programs.expert_counts
        return table + sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state)) + self._moved_bytes()

    def _moved_bytes(self) -> int:
        """Return a device's memory of a layer's experts, which a move makes
        anew; 0 without copies of experts.
        """
        if self.placed is None:
            return 0
        own = expert_arrays(self.weights["layers"][self.expert_layers[0]])
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(own)) // self.programs.mesh.size

    def allocate(self, num_pages: tuple[int, ...]) -> None:
        """Allocate the KV cache and the per-slot state. `num_pages`: pages of each layer group."""
        mesh = self.programs.mesh
        self.num_pages = num_pages
        self.kv = make_cache(self.page_groups, self.lower.pages_of_ranks(num_pages), self.page_size, mesh)
        ranks, counts = self.ranks, self.programs.expert_counts
        make = jax.jit(
            lambda: (
                jnp.zeros((ranks * self.groups, self.slots, self.pages_per_sequence), jnp.int32),
                jnp.zeros((ranks * self.slots,), jnp.int32),
                tuple(jnp.zeros((ranks * a.shape[0], *a.shape[1:]), a.dtype) for a in counts),
                *self.lower.empty_slots(ranks),
            ),
            out_shardings=self._by_rank,
        )
        self.page_table, self.last_tokens, self.expert_counts, self.params, self.counts = make()

    def warm_up(
        self,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        on_compiled: Callable[[], None] = lambda: None,
        first: Collection[StepLayout] | None = None,
    ) -> float:
        """Compile the programs, several at a time, and run those of `rehearsed`. Return the seconds.

        on_compiled: called before the first program runs. first: see `compile`.
        """
        start = time.perf_counter()
        self.compile(on_progress, first)
        on_compiled()
        with self._times.phase("rehearsal"):
            for layout in rehearsed(self):
                rehearse(self, layout)
            self.set_slot(0, slot_values(), np.zeros(1, np.int32), 0)
            self.count_compilations()
        return time.perf_counter() - start

    def compile(
        self,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        first: Collection[StepLayout] | None = None,
    ) -> None:
        """Compile the programs for the allocated pages, and the programs that copy pages.

        Arguments: see `ProgramCompiler.compile`.
        """
        self.compiler.compile(self.num_pages, on_progress, first)
        if self.copies is not None:
            self.kv = self.copies.warm_up(self.kv)
        self._warm = True

    def count_compilations(self) -> None:
        """Begin to count `compilations`, once every program has run."""
        jax.block_until_ready(self.kv)
        self._compiled_at_warm_up = num_compiled()

    def compile_deferred(self) -> None:
        """Compile the deferred programs on a thread, a little later, as long as the engine exists."""
        tables: tuple[dict, ...] = (self.compiler.steps, self.compiler.samplers, self.compiler.prompt)
        programs = (one for table in tables for one in table.values() if isinstance(one, DeferredProgram))
        if jobs := [while_it_lives(program.ready) for program in programs]:
            compile_in_background(jobs, DELAY_S)

    # ---- masked samplers, which the first request with a constraint compiles

    def prepare_masks(self) -> None:
        """Compile the masked sampler of the most rows, and the others on a thread. Any thread may call it.

        A later call returns at once.
        """
        rows = sorted({layout.rows for layout in self.compiler.every_layout() if layout.full})
        self.compiler.masked(rows[-1]).ready()
        with self._masks_lock:
            others, self._masks_asked = [] if self._masks_asked else rows[:-1], True
        if others:
            compile_in_background([while_it_lives(self.compiler.masked(one).ready) for one in others])

    def masks_ready(self, layout: StepLayout) -> bool:
        """Return True if a step of the layout runs the masked sampler without a compilation."""
        return self.compiler.masked(layout.rows).is_made

    # ---- layouts that become ready while the engine serves

    @property
    def substitutes(self) -> bool:
        """Return True if steps must ask `is_ready`.

        Otherwise a step of any layout runs, if need be after a compilation.
        """
        return self.compiler.first is not None

    def is_ready(self, layout: StepLayout, *, full: bool, prompt: bool) -> bool:
        """Return True if a step of the layout runs without a compilation.

        full, prompt: with these samplers.
        """
        made = self.compiler
        needed: list[Any] = [made.steps.get(layout.key), made.samplers.get((layout.rows, "plain"))]
        if full:
            needed.append(made.samplers.get((layout.rows, "full")))
        if prompt:
            needed.append(made.prompt.get(layout.tokens))
        return not any(isinstance(program, DeferredProgram) for program in needed)

    def unready(self) -> list[StepLayout]:
        """Return the layouts that have a deferred program, the smallest first, of
        equal ones those of decodes first.
        """
        every = self.compiler.every_layout()
        found = [layout for layout in every if not self.is_ready(layout, full=True, prompt=True)]
        return sorted(found, key=lambda layout: (layout.tokens, not layout.decodes))

    def compile_layout(self, layout: StepLayout) -> None:
        """Compile the deferred programs of a layout. Any thread may call it."""
        for table, key in self.compiler.programs_of(layout):
            if isinstance(program := table[key], DeferredProgram):
                program.ready()

    def set_ready(self, layout: StepLayout) -> None:
        """Let steps run the compiled programs of a layout."""
        for table, key in self.compiler.programs_of(layout):
            if isinstance(program := table[key], DeferredProgram):
                table[key] = program.ready()

    @property
    def compilations(self) -> int:
        """The number of backend compilations since warm-up, which must be 0."""
        return num_compiled() - self._compiled_at_warm_up

    # ---- serving

    def run(
        self,
        layout: StepLayout,
        buffer: np.ndarray,
        appends: np.ndarray,
        *,
        full: bool,
        targets: np.ndarray | None = None,
        masks: Callable[[], np.ndarray] | None = None,
    ) -> Pending:
        """Enqueue a step.

        Args:
          buffer: [layout.size] int32, from `layout.pack`; of all ranks.
          appends: [n, 4] int32, page-table entries that do not fit in the buffer;
            of several ranks [ranks, n, 4].
          full: True if a row needs the full sampler.
          targets: [T] int32, each token's successor in its prompt, for prompt
            log-probabilities; of all ranks.
          masks: returns the tokens that each row may draw, as bits, [R, mask_words] int32; of
            all ranks. The step then runs the masked sampler. The call comes once the forward is
            enqueued, so the host finds the masks while the device runs. With a recorder it comes
            first, because the other processes need the masks.
        """
        found = None
        if self.recorder is not None:
            found = None if masks is None else masks()
            self.recorder.run(layout, buffer, appends, full, targets, found)
        enqueued_s = time.perf_counter()
        hidden, x, rows = self.advance(layout, buffer, appends, self.last_tokens)
        if masks is not None and found is None:
            found = masks()
        return self.draw(layout, hidden, x, rows, enqueued_s, full=full, targets=targets, masks=found)

    def advance(
        self, layout: StepLayout, buffer: np.ndarray, appends: np.ndarray, source: jax.Array
    ) -> tuple[jax.Array, jax.Array, Rows]:
        """Enqueue the forward of a step. Arguments and results: see `run` and `run_program`."""
        for i in range(0, appends.shape[-2], APPENDS):
            piece, some = (
                np.full((self.ranks, APPENDS, 4), self.groups, np.int32),
                appends[..., i : i + APPENDS, :],
            )
            piece[:, : some.shape[-2]] = some
            piece = place(piece.reshape(-1, 4), self._by_rank)
            self.page_table = self.compiler.small["append_pages"](self.page_table, piece)
        return self.run_program(self.compiler.steps[layout.key], place(buffer, self._by_rank), source)

    def draw(
        self,
        layout: StepLayout,
        hidden: jax.Array,
        x: jax.Array,
        rows: Rows,
        enqueued_s: float,
        *,
        full: bool,
        targets: np.ndarray | None,
        masks: np.ndarray | None = None,
    ) -> Pending:
        """Enqueue the sampler of a step whose forward is enqueued. Arguments: see `run`."""
        found, made = None, self.compiler
        if full or masks is not None:
            more = () if masks is None else (place(masks, self._by_rank),)
            sampler = made.samplers[layout.rows, "full"] if masks is None else made.masked(layout.rows)
            tokens, found, self.last_tokens, recent, self.counts = sampler(
                self._head, hidden, rows, self.last_tokens, self.params, self.counts, *more
            )
            found = found if full else None
            self.params = dataclasses.replace(self.params, recent=recent)
        else:
            plain = made.samplers[layout.rows, "plain"]
            tokens, self.last_tokens = plain(self._head, hidden, rows, self.last_tokens)
        prompt = None
        if targets is not None:
            prompt = made.prompt[layout.tokens](self._prompt_head, x, place(targets, self._by_rank))
        for array in jax.tree.leaves((tokens, found, prompt)):
            array.copy_to_host_async()
        return Pending(tokens, found, prompt, enqueued_s, self.expert_counts)

    def run_program(
        self, program: Callable, buffer: jax.Array, source: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, Rows]:
        """Enqueue a compiled step (`Programs.step`) on the weights, the KV cache and the page table.

        Args:
          buffer: [layout.size] int32 on the device, see `layout.pack`.
          source: [Q] int32, each slot's last token, or the residual stream that a later pipeline stage reads.
            None takes the tokens that the samplers drew.

        Returns:
          The hidden states of the rows that sample, of all tokens, and the samplers' rows.
        """
        source = self.last_tokens if source is None else source
        hidden, x, rows, self.kv, self.page_table, *counts = program(
            self.weights, self.kv, self.page_table, source, buffer, *self.expert_counts
        )
        self.expert_counts = tuple(counts)
        return hidden, x, rows

    # ---- experts in slots

    def move_experts(self, layer: int, placed: np.ndarray) -> MovedLayer:
        """Enqueue copies of a layer's experts to new slots. Steps read the
        present ones until `switch_experts`.

        placed: the expert of each new slot, [S].
        """
        assert self.placed is not None
        if self.recorder is not None:
            self.recorder.move_experts(layer, placed)
        source = source_slots(self.placed[self.expert_layers.index(layer)], placed)
        own = expert_arrays(self.weights["layers"][layer])
        arrays, before, after = self.compiler.small["move_experts"](own, self._put(source))
        return MovedLayer(layer, placed, source, arrays, before, after)

    def switch_experts(self, moved: MovedLayer) -> None:
        """Let the next step read the moved experts and their map."""
        assert self.placed is not None
        if self.recorder is not None:
            self.recorder.switch_experts(moved.layer)
        made = copy_map(moved.placed, self.programs.context.config.num_experts, self.programs.mesh.size)
        layers = list(self.weights["layers"])
        layers[moved.layer] = layers[moved.layer] | moved.arrays | jax.tree.map(self._put, made)
        self.weights = self.weights | {"layers": layers}
        self.placed = self.placed.copy()
        self.placed[self.expert_layers.index(moved.layer)] = moved.placed

    # ---- pages of the KV cache

    def add_page_copies(self, copies: PageCopies | RankCopies) -> None:
        """Add the programs of `gather_pages` and `scatter_pages`. Several ranks run them by `RankPages`.

        `warm_up` compiles them; on a warm executor they are compiled at once.
        """
        self.copies = copies
        if self._warm:
            self.kv = copies.warm_up(self.kv)

    def page_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shape of a page of each layer group, as `gather_pages` returns it."""
        assert isinstance(self.copies, PageCopies), "add_page_copies comes first"
        return [programs.page_shape() for programs in self.copies.programs]

    def gather_pages(self, group: int, pages: Sequence[int]) -> list[jax.Array]:
        """Enqueue a read of pages of one layer group, after the steps that are enqueued already.

        Returns:
          One array a page: uint32 [tp, W] on the device, W words of each shard.
        """
        assert isinstance(self.copies, PageCopies), "add_page_copies comes first"
        found = self.copies.gather(self.kv, group, pages)
        if self.recorder is not None:
            self.recorder.gathered(group, pages, found)
        return found

    def scatter_pages(self, group: int, pages: Sequence[int], data: Sequence[jax.Array]) -> None:
        """Enqueue a write of `data` (see `gather_pages`) to pages of one layer group, all different.

        Steps that are enqueued later read the new content.
        """
        assert isinstance(self.copies, PageCopies), "add_page_copies comes first"
        if self.recorder is not None:
            self.recorder.scatter_pages(group, pages, data)
        self.kv = self.copies.scatter(self.kv, group, pages, data)

    @property
    def rank_copies(self) -> RankCopies:
        """Return the programs that copy the pages of several ranks."""
        assert isinstance(self.copies, RankCopies), "add_page_copies comes first"
        return self.copies

    def scatter_to_rank(self, rank: int, group: int, pages: Sequence[int], data: Sequence[jax.Array]) -> None:
        """Enqueue a write of a rank's pages, see `scatter_pages`."""
        self.kv = self.rank_copies.scatter(self.kv, rank, group, pages, data)

    def fill_kv(self, fill: Callable[[int, jax.Array], jax.Array]) -> None:
        """Replace each array of the KV cache by `fill(index, array)`, for measurements.

        `fill` may donate the array. Arrays are replaced one by one, because two caches do not fit.
        """
        arrays, tree = jax.tree.flatten(self.kv)
        self.kv: Any = None
        for i in range(len(arrays)):
            arrays[i] = fill(i, arrays[i])
        self.kv = jax.tree.unflatten(tree, arrays)

    def set_slot(self, slot: int, values: SlotParams, token_ids: np.ndarray, num_prompt: int) -> None:
        """Store a sequence's sampling settings and the tokens that its penalties count, for a slot.

        Args:
          slot: among the slots of all ranks.
          token_ids: [n] int32, all known tokens, the prompt's `num_prompt` tokens first; empty without
            penalties.
        """
        if self.recorder is not None:
            self.recorder.set_slot(slot, values, token_ids, num_prompt)
        index = self._put(np.int32(slot))
        self.params, self.counts = self.compiler.small["set_slot"](
            self.params, self.counts, index, jax.tree.map(self._put, values)
        )
        for i in range(0, len(token_ids), COUNTED):
            ids, outputs = np.full(COUNTED, NO_TOKEN, np.int32), np.zeros(COUNTED, bool)
            n = len(token_ids[i : i + COUNTED])
            ids[:n] = token_ids[i : i + n]
            outputs[:n] = np.arange(i, i + n) >= num_prompt
            self.counts = self.compiler.small["count_tokens"](
                self.counts, index, self._put(ids), self._put(outputs)
            )

    def _put(self, x) -> jax.Array:
        return place(x, self.replicated)
