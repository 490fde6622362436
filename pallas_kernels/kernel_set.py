"""The choice of an implementation for each op, by device, shapes and dtypes.

Hopper runs the Mosaic kernels. Other NVIDIA GPUs run jax-triton kernels where they exist. All other devices
run the reference implementations. An op falls back to its reference implementation if its kernel does not
support the model's shapes or dtypes, and the kernel set holds the reason. A kernel set is frozen data, so a
compiled step is a function of it.
"""

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping

import jax.numpy as jnp

from pallas_kernels.attention.chunk import reference as chunk_reference
from pallas_kernels.attention.decode import reference as decode_reference
from pallas_kernels.attention.latent import reference as latent_reference
from pallas_kernels.attention.tiles import WIDEST, WIDEST_GROUP, WIDTHS
from pallas_kernels.cards import card_of
from pallas_kernels.cpu import chunk_attention as cpu_chunk
from pallas_kernels.cpu import decode_attention as cpu_decode
from pallas_kernels.cpu import draw as cpu_draw
from pallas_kernels.cpu import gemm as cpu_gemm
from pallas_kernels.cpu import rope_append as cpu_rope
from pallas_kernels.gemm import reference as gemm_reference
from pallas_kernels.gemm.api import HopperGemm, Product
from pallas_kernels.gemm.expert_mlp import reference as expert_mlp_reference
from pallas_kernels.gemm.grouped import groups as expert_groups
from pallas_kernels.gemm.grouped import reference as grouped_reference
from pallas_kernels.gemm.router import reference as router_reference
from pallas_kernels.gemm.sorted_rows import reference as sorted_rows_reference
from pallas_kernels.gemm.tuned_table import load
from pallas_kernels.pointwise.draw import reference as draw_reference
from pallas_kernels.pointwise.norm import reference as norm_reference
from pallas_kernels.pointwise.quantize import reference as quantize_reference
from pallas_kernels.pointwise.rope_append import reference as rope_reference
from pallas_kernels.pointwise.sample import reference as sample_reference
from pallas_kernels.pointwise.top_k import reference as top_k_reference
from pallas_kernels.triton.gemm import TritonGemm

KERNELS = ("auto", "reference", "mosaic", "triton")  # values of the setting `kernels`
HOPPER, MOSAIC = "9.0", "mosaic-hopper"  # compute capability and name of the set of Mosaic kernels
PAGED = ("rope_append", "decode_attention", "chunk_attention")  # ops on the pages of the KV cache
# The same ops on pages of latent vectors.
LATENT = {op: f"latent_{op}" for op in ("decode_attention", "chunk_attention")}
MIXTURE = ("top_k", "grouped_gemm")  # ops of a mixture of experts
OPS = ("gemm", "add_norm", *PAGED, "draw_filtered", "draw", "quantize_rows", *MIXTURE)
_XLA = ("reference", "cpu")  # backends that are operations of XLA
_KIB = {
    "7.0": 96,
    "7.5": 64,
    "8.0": 163,
    "8.7": 163,
    "9.0": 227,
    "10.0": 227,
    "10.3": 227,
}  # KiB of shared memory for a thread block
_LEAST_KIB = 99  # all other GPUs that Triton supports: 8.6, 8.9, 12.0, 12.1


@dataclasses.dataclass(frozen=True)
class Fallback:
    """A reason for falling back to the reference implementation: the model setting that the kernel does not
    support.

    op: name of the op. field: field of `Model`. value: the model's value. accepted: the supported values,
    in words.
    """

    op: str
    field: str
    value: int | str
    accepted: str


@dataclasses.dataclass(frozen=True)
class KernelSet:
    """One function for each op, with the signature of its reference implementation. `list_…` functions make
    work lists.

    fallbacks: at least one reason for every op that has a kernel in this set but runs the reference
    implementation.
    expert_mlp_max_tokens, expert_mlp_bf16_max_tokens: the largest steps whose experts' products run as
    `expert_mlp`, for experts in e4m3 and in bfloat16.
    norm_of_rows_max_tokens: the largest step whose norms add the rows of experts.
    route_max_tokens, route_and_sort_max_tokens: the largest steps whose routers run as `route`, and as
    `route_and_sort`.
    by_head_dim: where the layers of a model have several head widths, the sets of all widths. Attention, the
    append to the cache and the quantization of heads are taken from them.
    """

    name: str
    gemm: Callable = gemm_reference.gemm
    add_norm: Callable = norm_reference.add_norm
    rope_append: Callable = rope_reference.rope_append
    decode_attention: Callable = decode_reference.decode_attention
    chunk_attention: Callable = chunk_reference.chunk_attention
    draw_filtered: Callable = sample_reference.draw_filtered
    draw: Callable = draw_reference.draw
    quantize_rows: Callable = quantize_reference.quantize_rows
    quantize_blocks: Callable = quantize_reference.quantize_blocks  # XLA computes it on all devices
    top_k: Callable = top_k_reference.top_k
    route: Callable = router_reference.route
    route_and_sort: Callable = router_reference.route_and_sort
    route_max_tokens: int = 0
    route_and_sort_max_tokens: int = 0
    sort_rows: Callable = sorted_rows_reference.sort_rows
    grouped_gemm: Callable = grouped_reference.grouped_gemm
    expert_mlp: Callable = expert_mlp_reference.expert_mlp
    few_expert_mlp: Callable = expert_mlp_reference.few_expert_mlp
    expert_mlp_max_tokens: int = 0
    expert_mlp_bf16_max_tokens: int = 0
    norm_of_rows_max_tokens: int = 0
    latent_append: Callable = latent_reference.append
    latent_decode_attention: Callable = latent_reference.decode_attention
    latent_chunk_attention: Callable = latent_reference.chunk_attention
    latent_up_chunk_attention: Callable | None = None  # None: all chunks run in the absorbed form
    list_decode_work: Callable = decode_reference.list_decode_work
    list_latent_work: Callable = latent_reference.list_decode_work
    list_latent_chunk_work: Callable = latent_reference.list_chunk_work
    list_latent_up_chunk_work: Callable = latent_reference.list_up_chunk_work
    list_chunk_work: Callable = chunk_reference.list_chunk_work
    list_groups: Callable = expert_groups.list_groups
    fallbacks: tuple[Fallback, ...] = ()
    by_head_dim: "tuple[tuple[int, KernelSet], ...]" = ()

    def for_heads(self, head_dim: int) -> "KernelSet":
        """Return the set for layers with this head width."""
        return dict(self.by_head_dim).get(head_dim, self)

    @property
    def kernel_ops(self) -> tuple[str, ...]:
        """Return the ops that run kernels, and not operations of XLA alone."""
        return tuple(op for op in OPS if self._place(op) not in _XLA)

    def _place(self, op: str) -> str:
        """Return the backend of an op: that of its kernel for latent vectors, if the set has one."""
        latent = getattr(self, LATENT.get(op, op))
        return _backend(getattr(self, op) if _backend(latent) in _XLA else latent)

    @property
    def supports_pdl(self) -> bool:
        """Return whether kernels of small batches can start before the previous kernel has ended."""
        return isinstance(self.gemm, HopperGemm)

    @property
    def can_be_bounded(self) -> bool:
        """Return whether the ops can run on a part of the SMs, next to other ops.

        Other sets always occupy all SMs.
        """
        return self.name == MOSAIC

    def with_pdl(self) -> "KernelSet":
        """Return the same set with programmatic dependent launch in kernels of small batches
        (`pallas_kernels.hopper.pdl`).

        The kernels must be launched one by one, and the weights must be arguments of the program. Kernels
        without support stay unchanged.
        """
        return _with_pdl(self)

    def with_few_kernels(self, quantized: bool) -> "KernelSet":
        """Return the set with operations of XLA in place of the Mosaic kernels that such operations nearly
        match: norms, draws, and GEMMs of weights that are not quantized.

        The kernels take more time to trace and to lower. Other sets stay unchanged.
        """
        if self.name != MOSAIC:
            return self
        plain = {name: getattr(REFERENCE, name) for name in ("add_norm", "draw")}
        plain |= {} if quantized else {"gemm": REFERENCE.gemm}
        by_head_dim = tuple((width, own.with_few_kernels(quantized)) for width, own in self.by_head_dim)
        return dataclasses.replace(self, **plain, by_head_dim=by_head_dim)

    def describe(self, products: Mapping[str, Product] | None = None) -> str:
        """Return the backend of each op: one line for all ops except the GEMMs, and one line for each GEMM.

        products: the product of each dense op on one device, with any number of rows.
        """
        places = ", ".join(f"{op}: {self._place(op)}" for op in OPS if op != "gemm")
        lines = [f"kernels: {self.name} ({places})"]
        for width, own in self.by_head_dim:
            places = ", ".join(f"{op}: {own._place(op)}" for op in (*PAGED, "quantize_rows"))
            lines.append(f"kernels: heads of {width} columns ({places})")
        for op, p in (products or {}).items():
            how = "xla" if _backend(self.gemm) in _XLA else self.gemm.describe(p)  # type: ignore[attr-defined]
            lines.append(f"kernels: {op} [{p.shape.n}, {p.shape.k}] {p.shape.weights}: {how}")
        return "\n".join(lines)


@functools.cache
def _with_pdl(kernels: KernelSet) -> KernelSet:
    """Return one set for each set, because JAX caches a tracing by the op's function."""
    names = [
        name
        for name in (
            "add_norm",
            "rope_append",
            "decode_attention",
            "quantize_rows",
            "route",
            "route_and_sort",
        )
        if _backend(getattr(kernels, name)) == "mosaic"
    ]
    ops: dict[str, Callable] = {name: functools.partial(getattr(kernels, name), pdl=True) for name in names}
    if isinstance(kernels.gemm, HopperGemm):
        ops["gemm"] = dataclasses.replace(kernels.gemm, pdl=True)
    by_head_dim = tuple((width, _with_pdl(own)) for width, own in kernels.by_head_dim)
    return dataclasses.replace(kernels, **ops, by_head_dim=by_head_dim)


def _backend(kernel: Callable) -> str:
    """Return the backend of an op's function: reference, cpu, triton or mosaic."""
    if kernel.__module__.endswith(".reference"):
        return "reference"
    if kernel.__module__.startswith("pallas_kernels.cpu."):
        return "cpu"
    return "triton" if kernel.__module__.startswith("pallas_kernels.triton") else "mosaic"


REFERENCE = KernelSet("reference")
CPU = KernelSet(
    "cpu",
    gemm=cpu_gemm.gemm,
    rope_append=cpu_rope.rope_append,
    decode_attention=cpu_decode.decode_attention,
    chunk_attention=cpu_chunk.chunk_attention,
    draw=cpu_draw.draw,
)


@dataclasses.dataclass(frozen=True)
class Model:
    """The properties of one device's share of a model that limit kernels. Dtypes have JAX's names."""

    head_dim: int
    queries_per_kv_head: int
    kv_heads: int
    page_size: int
    dtype: str
    kv_dtype: str
    hidden_size: int
    attention_spans: bool = False  # the KV heads of a layer have their own spans and pages
    attention_sinks: bool = False  # the softmax's denominator has a learned term
    latent_attention: bool = False  # the cache holds latent vectors instead of keys and values
    latent_rank: int = 0  # columns of a latent vector
    latent_rope_dim: int = 0  # columns of its rotary key
    latent_value_dim: int = 0  # columns of a head's value


def kernel_set_for(
    platform: str,
    capability: str,
    *,
    head_dim: int,
    queries_per_kv_head: int,
    page_size: int,
    dtype,
    kv_dtype,
    kv_heads: int = 8,
    hidden_size: int = 4096,
    device: str = "",
    kernels: str = "auto",
    attention_spans: bool = False,
    attention_sinks: bool = False,
    latent_attention: bool = False,
    latent_rank: int = 0,
    latent_rope_dim: int = 0,
    latent_value_dim: int = 0,
) -> KernelSet:
    """Return the fastest kernels for a device and these shapes. Ops without a kernel run the reference
    implementation.

    Args:
      platform: JAX's name of the backend, `gpu` or `cpu`.
      capability: CUDA's compute capability, for example "9.0"; empty for other devices.
      kv_heads: KV heads of one device. queries_per_kv_head: with latent attention,
          the query heads of one device.
      device: JAX's `device_kind`, whose tuned table chooses the GEMM
        kernels.
      kernels: one of `KERNELS`; auto: by the device.
    Raises:
      ValueError: if the requested kernels cannot run on the device.
    """
    model = Model(
        head_dim,
        queries_per_kv_head,
        kv_heads,
        page_size,
        jnp.dtype(dtype).name,
        jnp.dtype(kv_dtype).name,
        hidden_size,
        attention_spans,
        attention_sinks,
        latent_attention,
        latent_rank,
        latent_rope_dim,
        latent_value_dim,
    )
    hopper, cuda = platform == "gpu" and has_bounded(capability), platform == "gpu" and capability != ""
    here = f"{platform} {capability}".strip()
    if kernels == "auto":
        if hopper and model.dtype != "bfloat16":
            unmet = _unmet(model, [(OPS, "dtype", False, "bfloat16")])
            return dataclasses.replace(REFERENCE, name="reference (kernels need bfloat16)", fallbacks=unmet)
        if platform == "cpu":
            return CPU
        kernels = "mosaic" if hopper else "triton" if cuda and has_triton() else "reference"
    if kernels == "reference":
        return REFERENCE
    if kernels == "mosaic":
        if not hopper:
            raise ValueError(
                f"kernels='mosaic': accepted are GPUs of compute capability {HOPPER}, this is {here}"
            )
        if model.dtype != "bfloat16":
            raise ValueError(f"kernels='mosaic': accepted is bfloat16, the model's dtype is {model.dtype}")
        return _mosaic(model, device)
    if kernels == "triton":
        if not cuda or not has_triton():
            raise ValueError(
                f"kernels='triton': accepted are NVIDIA GPUs, with the extra `triton`, this is {here}"
            )
        return _triton(model, capability)
    raise ValueError(f"kernels={kernels!r}: accepted are {', '.join(KERNELS)}")


def has_bounded(capability: str) -> bool:
    """Return whether the kernels for this compute capability can run on a part of the SMs
    (`KernelSet.can_be_bounded`).
    """
    return capability == HOPPER


def has_triton() -> bool:
    """Return whether the extra `triton` is installed."""
    return importlib.util.find_spec("jax_triton") is not None


def _unmet(m: Model, limits: Iterable[tuple[tuple[str, ...], str, bool, str]]) -> tuple[Fallback, ...]:
    """Return the fallbacks of a model.

    limits: (ops of the limit, the model's field, whether the model is within the limit, the accepted values).
    """
    return tuple(
        Fallback(op, field, getattr(m, field), accepted)
        for ops, field, kept, accepted in limits
        if not kept
        for op in ops
    )


def _assembled(
    name: str, kernels: Mapping[str, Mapping[str, Callable]], fallbacks: tuple[Fallback, ...]
) -> KernelSet:
    """Return a set of the kernels that the model can use.

    kernels: by op, its function and its list functions.
    """
    lost = {fallback.op for fallback in fallbacks}
    ops = {
        name: function
        for op, functions in kernels.items()
        if op not in lost
        for name, function in functions.items()
    }
    return dataclasses.replace(KernelSet(name, fallbacks=fallbacks), **ops)


def _mosaic(m: Model, device: str) -> KernelSet:
    """Return the Mosaic kernels that support the model.

    Mosaic GPU is imported only here, because its import takes a second.
    """
    from pallas_kernels.attention.chunk import api as chunk_attention
    from pallas_kernels.attention.decode import api as decode_attention
    from pallas_kernels.attention.latent import api as latent_attention
    from pallas_kernels.attention.latent import up_chunks
    from pallas_kernels.gemm.expert_mlp import api as expert_mlp
    from pallas_kernels.gemm.expert_mlp import few_tokens
    from pallas_kernels.gemm.grouped import api as grouped_gemm
    from pallas_kernels.gemm.router import api as router
    from pallas_kernels.hopper import ptxas_version
    from pallas_kernels.hopper.row_parts import takes_row
    from pallas_kernels.pointwise.draw import api as draw
    from pallas_kernels.pointwise.norm import api as rms_norm
    from pallas_kernels.pointwise.quantize import api as quantize_rows
    from pallas_kernels.pointwise.rope_append import api as rope_append
    from pallas_kernels.pointwise.sample import api as sample
    from pallas_kernels.pointwise.top_k import api as top_k

    ptxas_version.cache_version()
    card = card_of(device)
    kernels = {
        "gemm": {"gemm": HopperGemm(load(device))},
        "add_norm": {"add_norm": rms_norm.add_norm},
        "rope_append": {"rope_append": rope_append.rope_append},
        "decode_attention": {
            name: getattr(decode_attention, name) for name in ("decode_attention", "list_decode_work")
        },
        "chunk_attention": {
            name: getattr(chunk_attention, name) for name in ("chunk_attention", "list_chunk_work")
        },
        "draw_filtered": {"draw_filtered": sample.draw_filtered},
        "draw": {"draw": draw.draw},
        "quantize_rows": {"quantize_rows": quantize_rows.quantize_rows},
        "top_k": {"top_k": top_k.top_k, "route": router.route, "route_and_sort": router.route_and_sort},
        "grouped_gemm": {
            "grouped_gemm": grouped_gemm.grouped_gemm,
            "list_groups": grouped_gemm.list_groups,
            "sort_rows": _sort_rows(card.sort_rows_max_tokens, card.sort_held_rows_max_tokens),
            "expert_mlp": expert_mlp.expert_mlp,
            "few_expert_mlp": few_tokens.few_expert_mlp,
        },
    }
    queries, int8 = m.queries_per_kv_head, m.kv_dtype == "int8"
    widest, eight = m.head_dim == WIDEST, jnp.dtype(m.kv_dtype).itemsize == 1
    room = rope_append.takes(m.kv_heads, queries, m.head_dim, m.kv_dtype != m.dtype)
    divisor = 128 // math.gcd(128, m.head_dim)  # a shard has full groups of heads
    paged = [
        (
            PAGED[1:],
            "attention_sinks",
            not m.attention_sinks or m.kv_dtype == "bfloat16",
            "a cache of bfloat16",
        ),
        (("rope_append",), "head_dim", m.head_dim in (64, 128, 256), "64, 128 or 256"),
        (PAGED[1:], "head_dim", m.head_dim in WIDTHS, "64, 128, 256 or 512"),
        (PAGED[1:], "head_dim", not widest or not eight, "64, 128 or 256 with a cache of 8 bits"),
        (
            ("decode_attention",),
            "queries_per_kv_head",
            not widest or queries <= WIDEST_GROUP,
            f"up to {WIDEST_GROUP} with heads of {WIDEST}",
        ),
        (
            ("chunk_attention",),
            "attention_spans",
            not widest or not m.attention_spans,
            f"heads of less than {WIDEST}",
        ),
        (
            ("chunk_attention",),
            "attention_sinks",
            not widest or not m.attention_sinks,
            f"heads of less than {WIDEST}",
        ),
        (PAGED, "queries_per_kv_head", queries <= 16, "up to 16"),
        (PAGED, "page_size", m.page_size == 64, "64"),
        (PAGED, "kv_dtype", m.kv_dtype in ("bfloat16", "float8_e4m3fn", "int8"), "bfloat16, fp8 or int8"),
        (("chunk_attention",), "head_dim", not int8 or m.head_dim != 256, "64 or 128 with a cache of int8"),
        (("rope_append",), "kv_heads", room, f"fewer of {m.head_dim} with {queries} query heads each"),
        (
            ("rope_append",),
            "kv_heads",
            not int8 or m.kv_heads % 2 == 0,
            "even numbers a device with a cache of int8",
        ),
        (
            ("rope_append",),
            "attention_spans",
            not int8 or not m.attention_spans,
            "caches of bfloat16 and fp8, because a group can hold one head",
        ),
    ]
    if m.latent_attention:
        attend = PAGED[1:]
        kernels["decode_attention"] = {
            "latent_decode_attention": latent_attention.decode_attention,
            "list_latent_work": latent_attention.list_decode_work,
        }
        kernels["chunk_attention"] = {
            "latent_chunk_attention": latent_attention.chunk_attention,
            "list_latent_chunk_work": latent_attention.list_chunk_work,
        }
        plain_dim = m.head_dim - m.latent_rope_dim
        if up_chunks.takes(m.latent_rank, plain_dim, m.latent_value_dim, m.latent_rope_dim, queries):
            kernels["chunk_attention"]["latent_up_chunk_attention"] = up_chunks.up_chunk_attention
            kernels["chunk_attention"]["list_latent_up_chunk_work"] = up_chunks.list_up_chunk_work
        paged = [
            (("rope_append",), "latent_attention", False, "keys and values by head"),
            (attend, "latent_rank", m.latent_rank in latent_attention.RANKS, "128, 256, 384 or 512"),
            (attend, "latent_rope_dim", m.latent_rope_dim == latent_attention.ROTARY, "64"),
            (
                attend,
                "queries_per_kv_head",
                latent_attention.takes_heads(queries),
                "multiples of 8 up to 64 a device, and multiples of 64",
            ),
            (attend, "page_size", m.page_size == 64, "64"),
            (attend, "kv_dtype", m.kv_dtype == "bfloat16", "bfloat16"),
        ]
    limits = [
        *paged,
        (
            ("quantize_rows",),
            "queries_per_kv_head",
            queries % divisor == 0,
            f"multiples of {divisor} for a head width of {m.head_dim}",
        ),
        (
            ("quantize_rows",),
            "kv_heads",
            m.kv_heads * queries * m.head_dim <= quantize_rows.WIDEST,
            f"of {m.head_dim} with {queries} query heads each, up to {quantize_rows.WIDEST} columns a device",
        ),
        (
            ("add_norm",),
            "hidden_size",
            takes_row(m.hidden_size),
            "multiples of 64 from 128 on",
        ),
    ]
    found = _assembled(MOSAIC, kernels, _unmet(m, limits))
    if _backend(found.add_norm) == "mosaic":
        found = dataclasses.replace(found, norm_of_rows_max_tokens=card.norm_of_rows_max_tokens)
    names = (
        "expert_mlp_max_tokens",
        "expert_mlp_bf16_max_tokens",
        "route_max_tokens",
        "route_and_sort_max_tokens",
    )
    return dataclasses.replace(found, **{name: getattr(card, name) for name in names})


@functools.cache
def _sort_rows(max_tokens: int, held_max_tokens: int) -> Callable:
    """Return one function for the same limits, because JAX caches a tracing by the op's function."""
    from pallas_kernels.gemm.sorted_rows import api

    return functools.partial(api.sort_rows, max_tokens=max_tokens, held_max_tokens=held_max_tokens)


def _triton(m: Model, capability: str) -> KernelSet:
    """Return the Triton kernels that support the model."""
    from pallas_kernels.triton import decode_attention, grouped_gemm

    power_of_two, decode = m.head_dim >= 16 and m.head_dim & (m.head_dim - 1) == 0, ("decode_attention",)
    kib, head_bytes = (
        _KIB.get(capability, _LEAST_KIB),
        decode_attention.shared_bytes(1, jnp.dtype(m.dtype).itemsize),
    )
    most = 1 << ((kib << 10) // head_bytes).bit_length() - 1
    limits = [
        (decode, "attention_spans", not m.attention_spans, "full attention and windows"),
        (decode, "attention_sinks", not m.attention_sinks, "models without them"),
        (decode, "head_dim", power_of_two, "powers of two from 16"),
        (
            decode,
            "head_dim",
            m.head_dim <= most,
            f"up to {most} in {m.dtype}, which fills the shared memory of {capability}",
        ),
        (decode, "queries_per_kv_head", m.queries_per_kv_head <= 16, "up to 16"),
        (decode, "page_size", m.page_size == 64, "64"),
        (decode, "kv_dtype", m.kv_dtype == m.dtype, f"{m.dtype}, the dtype of the weights"),
    ]
    if m.latent_attention:
        limits = [(decode, "latent_attention", False, "keys and values by head")]
    kernels = {
        "gemm": {"gemm": TritonGemm()},
        "decode_attention": {"decode_attention": decode_attention.decode_attention},
        "grouped_gemm": {
            "grouped_gemm": grouped_gemm.grouped_gemm,
            "list_groups": grouped_gemm.list_groups,
            "sort_rows": grouped_gemm.sort_rows,
        },
    }
    return _assembled("triton", kernels, _unmet(m, limits))
