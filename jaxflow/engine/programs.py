"""The jitted functions of a step: the forward, the two samplers and the prompt log-probabilities.

A step is two programs. The forward is compiled for each token bucket, the samplers for each number of rows,
so that their numbers add instead of multiply. Both are enqueued together, and none waits for the host.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.stages import Wrapped
from jaxtyping import Array, Float, Int, UInt

from jaxflow.engine.layout import StepLayout, apply_page_appends, unpack
from jaxflow.kv.device_cache import cache_spec
from jaxflow.model import logprobs, ops, sampling, slot_params
from jaxflow.model.batch import Batch
from jaxflow.model.expert_tokens import add_tokens, mixture_layers
from jaxflow.model.op_registry import Context, Site, op_scope
from jaxflow.model.transformer import Routed
from jaxflow.parallel.mesh import DP, axis_of, by_rank, over_ranks, over_shards, ranks_have_processes

REPLICATED = PartitionSpec()
PLAIN, FULL, LOGPROBS = 1, 2, 3  # the sampler that a row of a step needs; LOGPROBS: FULL, with logprobs
NAN_LOGITS = -1  # in place of a token: the row's logits are NaN
STEP_DONATES, FULL_DONATES = (
    (1, 2),
    (5,),
)  # arguments of a step and of the full sampler that are updated in place


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The samplers' inputs for the rows of a step, [R] each."""

    slots: Int[Array, " R"]
    lengths: Int[Array, " R"]  # the position of the token to be drawn
    samples: Int[Array, " R"]  # PLAIN, FULL or LOGPROBS where the drawn token is kept, else 0
    temperature: Float[Array, " R"]
    seeds: UInt[Array, "R 2"]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The functions of a model, or of one pipeline stage, on a mesh.

    A `forward` is a compiled plan or the plain forward. embeds: False for a stage that reads the residual
    stream of the stage before. samples: False for a stage that another one follows.

    With data-parallel ranks every argument and result but the weights has the arrays of all ranks, one after
    another on axis 0, and each rank's device computes with its own. If the ranks are of several processes,
    every device has the results that the host reads, of all ranks.
    """

    context: Context
    mesh: Mesh
    weight_specs: Any  # a pytree of PartitionSpec
    rows_at_once: int = sampling.ROWS  # of the full sampler
    embeds: bool = True
    samples: bool = True

    def step(self, layout: StepLayout, forward: Callable) -> Wrapped:
        """(weights, kv, page_table, source, buffer) -> (hidden, x, rows, kv, page_table).

        source: each slot's last token, [Q] int32; for a stage that does not embed, the residual stream
        [T, D]. kv and page_table are donated: updated in place.
        A step with mixture layers has one more argument and one more result: `expert_counts`, not donated, so
        that the host can read the counts of an ended step while later steps run.
        """

        def run(weights, kv, page_table, source, buffer, *counts):
            page_table, batch, rows = self.inputs(layout, page_table, source, buffer)
            routed: Routed | None = [] if counts else None
            hidden, x, kv = forward(
                self.context, weights, kv, batch, **({"routed": routed} if counts else {})
            )
            return hidden, x, rows, kv, page_table, *self.counted(counts, routed, batch)

        kv_specs = [(cache_spec(self.mesh),) * 2 for _ in self.context.config.cached_layers]
        own = by_rank(self.mesh)
        counts = (own,) * len(self.expert_counts)
        specs = (self.weight_specs, kv_specs, own, own, own, *counts)
        out = (own, own, own, kv_specs, own, *counts)
        over_tp = over_shards(run, self.mesh, specs, out)
        return jax.jit(over_ranks(over_tp, self.mesh, specs, out), donate_argnums=STEP_DONATES)

    def _of_ranks(self, run: Callable, *everywhere: int, arguments: int, results: Any = None) -> Callable:
        """Return a function of each rank's own arguments, as a function of the arguments of all ranks.

        everywhere: the positions of the arguments that all ranks share, such as weights.
        results: the partition of each result. Default: each rank has its own.
        """
        if DP not in self.mesh.shape:
            return run
        own = by_rank(self.mesh)

        def spec(position: int, given: Any) -> Any:
            if position not in everywhere:
                return own
            return (
                {name: self.weight_specs[name] for name in given} if isinstance(given, dict) else REPLICATED
            )

        def call(*given: Any) -> Any:
            assert len(given) == arguments
            specs = tuple(map(spec, range(arguments), given))
            return over_ranks(run, self.mesh, specs, own if results is None else results)(*given)

        return call

    @property
    def _host_spec(self) -> PartitionSpec:
        """Return the partition of a result of `_for_host`."""
        return REPLICATED if ranks_have_processes(self.mesh) else by_rank(self.mesh)

    def _for_host(self, results: Any) -> Any:
        """Return a rank's results, or those of all ranks if the ranks are of several processes."""
        if not ranks_have_processes(self.mesh):
            return results
        return jax.tree.map(lambda array: lax.all_gather(array, DP, tiled=True), results)

    def _own_slot(self, slot: Array, slots: int) -> Array:
        """Return a slot among all ranks' as the rank's own slot; `slots`,
        which writes drop, on other ranks.
        """
        if DP not in self.mesh.shape:
            return slot
        own = slot - lax.axis_index(DP) * slots
        return jnp.where((own >= 0) & (own < slots), own, slots)

    @property
    def expert_counts(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shape of the tokens at each expert, [mixture layers, E]
        uint32; () without mixture layers.
        """
        layers, experts = len(mixture_layers(self.context.config)), self.context.config.num_experts
        return (jax.ShapeDtypeStruct((layers, experts), jnp.uint32),) if layers else ()

    def counted(self, counts: tuple[Array, ...], routed: Routed | None, batch: Batch) -> tuple[Array, ...]:
        """Return the counts of `expert_counts` after a step: of each rank, or if the ranks are of several
        processes, of all ranks in each.
        """
        if routed is None:
            return ()
        with op_scope("expert_tokens"):
            found = add_tokens(counts[0], routed, batch.is_token)
            if ranks_have_processes(self.mesh):
                found = counts[0] + lax.psum(found - counts[0], DP)  # uint32 wraps back
            return (found,)

    def inputs(
        self, layout: StepLayout, page_table: Array, source: Array, buffer: Array
    ) -> tuple[Array, Batch, Rows]:
        """Return the page table with the step's entries, the batch, and the samplers' rows.

        Arguments: see `step`.
        """
        page_table = apply_page_appends(page_table, layout.field(buffer, "page_appends"))
        batch = unpack(layout, buffer, page_table, source if self.embeds else None)
        if not self.embeds:
            batch = dataclasses.replace(batch, hidden=source)
        names = {
            "row_slots": "slots",
            "lengths": "lengths",
            "samples": "samples",
            "temperature": "temperature",
            "seeds": "seeds",
        }
        rows = Rows(**{target: layout.field(buffer, name) for name, target in names.items()})
        return page_table, batch, rows

    def _logits(self, head: dict, hidden: Float[Array, "R D"]) -> Float[Array, "R W"]:
        specs = ({name: self.weight_specs[name] for name in head}, REPLICATED)
        return over_shards(lambda w, h: ops.logits(Site(self.context, w), h), self.mesh, specs, REPLICATED)(
            head, hidden
        )

    def sample_plain(self) -> Wrapped:
        """(head, hidden, rows, last_tokens) -> (tokens [R], last_tokens): greedy and temperature only."""

        def run(head, hidden, rows, last_tokens):
            logits = self._logits(head, hidden)
            with op_scope("sample"):
                tokens = sampling.plain(
                    logits, rows.temperature, rows.seeds, rows.lengths, draw=self.context.kernels.draw
                )
                tokens = _none_of_nan(tokens, logits)
            return self._for_host(tokens), _keep(last_tokens, rows, tokens)

        results = (self._host_spec, by_rank(self.mesh))
        return jax.jit(self._of_ranks(run, 0, arguments=4, results=results))

    def sample_full(self, *, masked: bool = False) -> Wrapped:
        """(head, hidden, rows, last_tokens, params, counts) -> (tokens, logprobs, last_tokens, params.recent,
        counts); counts donated.

        masked: with one more argument, the tokens that each row may draw, [R, words] int32 of bits.
        """

        def run(head, hidden, rows, last_tokens, params, counts, *masks):
            logits = self._logits(head, hidden)
            with op_scope("sample"):
                slots = jnp.where(rows.samples >= FULL, rows.slots, counts.shape[0])
                tokens, counts, found = sampling.full_by_rows(
                    logits,
                    rows.temperature,
                    rows.seeds,
                    rows.lengths,
                    slots,
                    params,
                    counts,
                    rows.samples == LOGPROBS,
                    draw_filtered=self.context.kernels.draw_filtered,
                    most=self.rows_at_once,
                    masks=masks[0] if masked else None,
                )
                tokens = _none_of_nan(tokens, logits)
                recent = slot_params.add_recent(params.recent, slots, tokens)
            last_tokens = _keep(last_tokens, rows, tokens)
            return *self._for_host((tokens, found)), last_tokens, recent, counts

        results = (self._host_spec,) * 2 + (by_rank(self.mesh),) * 3
        of_ranks = self._of_ranks(run, 0, arguments=6 + masked, results=results)
        return jax.jit(of_ranks, donate_argnums=FULL_DONATES)

    def prompt_logprobs(self) -> Wrapped:
        """(weights of `prompt_head`, x [T, D], targets [T]) -> `LogprobsOut` of each token's successor, T
        rows.
        """
        config = self.context.config

        def run(weights, x, targets):
            _, hidden = ops.final_norm(Site(self.context, weights), x, None)
            found = logprobs.prompt_logprobs(
                hidden,
                ops.head_table(weights),
                targets,
                vocab_size=config.vocab_size,
                soft_cap=config.logits_soft_cap,
                axis=axis_of(self.mesh),
            )
            return self._for_host(found)

        def sharded_run(weights, x, targets):
            specs = {name: self.weight_specs[name] for name in weights}
            return over_shards(run, self.mesh, (specs, REPLICATED, REPLICATED), REPLICATED)(
                weights, x, targets
            )

        return jax.jit(self._of_ranks(sharded_run, 0, arguments=3, results=self._host_spec))

    def set_slot(self) -> Wrapped:
        """(params, counts, slot, values) -> (params, counts), both donated: a running sequence takes a slot.

        slot: among the slots of all ranks.
        """

        def run(params, counts, slot, values):
            return slot_params.set_slot(params, counts, self._own_slot(slot, counts.shape[0]), values)

        return jax.jit(self._of_ranks(run, 2, 3, arguments=4), donate_argnums=(0, 1))

    def count_tokens(self) -> Wrapped:
        """(counts, slot, token_ids [n], outputs [n]) -> counts, donated: the tokens that penalties look back
        on. slot: among the slots of all ranks.
        """

        def run(counts, slot, token_ids, outputs):
            return slot_params.count_tokens(counts, self._own_slot(slot, counts.shape[0]), token_ids, outputs)

        return jax.jit(self._of_ranks(run, 1, 2, 3, arguments=4), donate_argnums=(0,))

    def append_pages(self) -> Wrapped:
        """(page_table, appends [n, 4]) -> page_table, donated: entries that
        did not fit in a step's buffer.
        """
        return jax.jit(self._of_ranks(apply_page_appends, arguments=2), donate_argnums=(0,))


def head(weights: dict) -> dict:
    """The weights that turn hidden states into scores."""
    return {name: weights[name] for name in ("embed", "lm_head") if name in weights}


def prompt_head(weights: dict) -> dict:
    """The weights that turn the last layer's residual stream into scores."""
    return {
        name: weights[name]
        for name in ("embed", "lm_head", "final_norm", "final_norm_bias")
        if name in weights
    }


def _none_of_nan(tokens: Int[Array, " R"], logits: Float[Array, "R V"]) -> Int[Array, " R"]:
    """Return the tokens [R], with `NAN_LOGITS` where the logit of the token is NaN, as in a row of NaN."""
    drawn = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return jnp.where(jnp.isnan(drawn), NAN_LOGITS, tokens)


def _keep(last_tokens: Int[Array, " Q"], rows: Rows, tokens: Int[Array, " R"]) -> Int[Array, " Q"]:
    """Each slot's last sampled token, for the next step to gather; rows that do not sample leave theirs."""
    slots = jnp.where(rows.samples > 0, rows.slots, last_tokens.shape[0])
    return last_tokens.at[slots].set(tokens, mode="drop", wrap_negative_indices=False)
