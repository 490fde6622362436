"""The spans file, the classes of heads, and the attention of heads with spans against a plain definition."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflow.config import SPAN_UNITS, ConfigError, EngineConfig, Layer, Span
from jaxflow.engine.start import open_model
from jaxflow.kv.device_cache import cache_shapes, page_groups
from jaxflow.model import ops, transformer
from jaxflow.model.attention_spans import MOST_CLASSES, class_of, span_classes, with_spans
from jaxflow.model.batch import Batch
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.checkpoints.fingerprint import kv_fingerprint
from jaxflow.model.head_groups import call_once_traced, join_heads, take_heads, windows_at
from jaxflow.model.op_registry import Context, Site
from pallas_kernels.attention.chunk.reference import chunk_attention
from pallas_kernels.attention.decode.reference import decode_attention
from pallas_kernels.attention.decode.work_list import decode_work, stacked_work
from pallas_kernels.kernel_set import REFERENCE

MODEL = "tiny-llama"  # 2 layers of 2 KV heads
GOOD = {
    "schema_version": 1,
    "model": MODEL,
    "layers": 2,
    "kv_heads": 2,
    "sinks": 4,
    "alpha": [[8, 512], [16, 0]],
    "beta": [[0.25, 0], [0, 0.5]],
}


@pytest.fixture
def opened(tmp_path):
    """Return a function from the fields of a spans file to the checkpoint with the spans."""

    def made(model=MODEL, /, **changes):
        path = tmp_path / "spans.json"
        path.write_text(json.dumps(GOOD | changes))
        return open_model(EngineConfig(str(paths.MODELS / model), attention_spans=str(path)))

    return made


def test_a_file_gives_each_head_its_span_and_its_group(opened):
    config = opened().model_config
    assert config.layers[0].spans == (Span(4, 8, 256), Span(4, 512, 0))
    assert config.windows == (None, Span(4, 0, 512), Span(4, 8, 256), Span(4, 16, 0))
    assert [layer.head_groups for layer in config.layers] == [(2, 0), (3, 1)]
    assert config.layers[0].group_heads == {0: (1,), 2: (0,)}


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("schema_version", {"schema_version": 2}),
        ("model", {"model": "tiny-qwen2"}),
        ("layers", {"layers": 3, "alpha": [[8, 8]] * 3, "beta": [[0, 0]] * 3}),
        ("kv_heads", {"kv_heads": 1, "alpha": [[8]] * 2, "beta": [[0]] * 2}),
        ("layers", {"layers": 0}),
        ("sinks", {"sinks": -1}),
        ("alpha", {"alpha": [[8, 8]]}),
        (r"alpha\[1\]", {"alpha": [[8, 8], [8]]}),
        (r"beta\[0\]", {"beta": [[0], [0, 0]]}),
        (r"alpha\[1\]\[1\]", {"alpha": [[8, 8], [16, 0]], "beta": [[0, 0], [0, 0]]}),
        (r"alpha\[0\]\[0\]", {"alpha": [[-1, 8], [8, 8]]}),
        (r"alpha\[0\]\[1\]", {"alpha": [[8, 2.5], [8, 8]]}),
        (r"alpha\[1\]\[0\]", {"alpha": [[8, 8], [float("nan"), 8]]}),
        (r"alpha\[1\]\[0\]", {"alpha": [[8, 8], [float("inf"), 8]]}),
        (r"beta\[0\]\[0\]", {"beta": [[1.01, 0], [0, 0]]}),
        (r"beta\[1\]\[1\]", {"beta": [[0, 0], [0, float("nan")]]}),
    ],
)
def test_a_bad_file_is_refused_by_its_field(opened, field, changes):
    with pytest.raises(ConfigError, match=f"attention_spans.{field}="):
        opened(**changes)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", json.dumps(GOOD | {"gamma": 1}).encode()])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    path = tmp_path / "spans.json"
    path.write_bytes(content)
    for name in (path, tmp_path / "missing.json"):
        with pytest.raises(ConfigError, match=r"attention_spans="):
            open_model(EngineConfig(str(paths.MODELS / MODEL), attention_spans=str(name)))


def test_a_model_with_windows_is_refused(opened):
    shape = open_checkpoint(str(paths.MODELS / "tiny-gemma2")).model_config
    layers, heads = shape.num_layers, shape.num_kv_heads
    rows = {name: [[8 * (name == "alpha")] * heads] * layers for name in ("alpha", "beta")}
    with pytest.raises(ConfigError, match=r"attention_spans=.*windows"):
        opened("tiny-gemma2", model="tiny-gemma2", layers=layers, kv_heads=heads, **rows)


def test_layers_that_read_other_layers_are_refused(tmp_path):
    path, model = tmp_path / "spans.json", open_checkpoint(str(paths.MODELS / MODEL)).model_config
    path.write_text(json.dumps(GOOD))
    first, last = model.layers
    config = EngineConfig(str(paths.MODELS / MODEL), attention_spans=str(path))
    shared = (first, dataclasses.replace(last, shares_kv=True))
    for changes in ({"layers": shared}, {"layer_input_size": 8}):
        with pytest.raises(ConfigError, match=r"attention_spans=.* a file of spans"):
            with_spans(config, dataclasses.replace(model, **changes), MODEL)


@pytest.mark.parametrize("field", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_several_devices_are_refused(field):
    with pytest.raises(ConfigError, match=f"{field}=2"):
        EngineConfig("model", attention_spans="spans.json", **{field: 2})


def test_spans_name_the_pages(opened):
    """Later layers' KV depends on the spans, so their pages never mix."""
    config = EngineConfig("model", block_size=16)
    found = [opened(), opened(sinks=5), opened(alpha=[[8, 512], [17, 0]])]
    found.append(open_checkpoint(str(paths.MODELS / MODEL)))
    assert len({kv_fingerprint(config, checkpoint) for checkpoint in found}) == len(found)


spans = st.builds(Span, st.just(4), st.integers(0, 300), st.integers(1, SPAN_UNITS))


@given(st.lists(spans, min_size=1, max_size=30))
def test_a_class_covers_its_heads_at_every_length(heads):
    longest = 256
    classes = span_classes(tuple(heads), longest)
    assert 1 <= len(classes) == len(set(classes)) <= MOST_CLASSES and None not in classes[1:]
    for span in heads:
        window = classes[class_of(span, classes, longest)]
        if isinstance(window, Span):
            assert all(window.window(p) >= span.window(p) for p in range(longest))
        else:
            assert span.window(longest - 1) >= longest


def test_few_spans_are_their_own_classes():
    few = [Span(0, 8, 0), Span(0, 16, 128), Span(0, 300, 0), Span(0, 32, 0)]
    assert set(span_classes(tuple(few * 3), 256)) == {None, *few[:2], few[3]}


# ---- attention

SIZE, HEADS, GROUP, WIDTH = 4, 3, 2, 8
LENGTH = 37


def plain(q, k, v, own, sinks):
    """Return the attention of all positions. q: [T, N, H]. k, v: [T, K, H]. own: the span of each head."""
    out = np.zeros_like(q)
    for p in range(len(q)):
        for n in range(q.shape[1]):
            span = own[n // GROUP]
            keys = [j for j in range(p + 1) if j < sinks or p - j < span.window(p)]
            weights = np.exp(k[keys, n // GROUP] @ q[p, n])
            out[p, n] = weights @ v[keys, n // GROUP] / weights.sum()
    return out


def paged(rng, x):
    """Return (pages [P, K, S, H], page table [1, MP]) of keys or values [T, K, H] in random places."""
    number = -(-len(x) // SIZE)
    table = rng.permutation(number + 2)[:number].astype(np.int32)
    pages = np.zeros((number + 2, x.shape[1], SIZE, x.shape[2]), np.float32)
    for p in range(len(x)):
        pages[table[p // SIZE], :, p % SIZE] = x[p]
    return pages, table[None]


chunk = jax.jit(functools.partial(chunk_attention, scale=1.0), static_argnames="sinks")
decode = jax.jit(functools.partial(decode_attention, scale=1.0), static_argnames="sinks")


def attend(q, k, v, own, sinks, cuts):
    """Return the attention of all positions: chunks between the cuts, and decodes after the last cut."""
    k_pages, table = paged(np.random.default_rng(1), k)
    v_pages = paged(np.random.default_rng(1), v)[0]

    def at(positions):
        layer = Layer(spans=own, head_groups=(0,) * HEADS)
        return None if own is None else windows_at(layer, range(HEADS), positions)

    out = []
    for start, stop in itertools.pairwise((0, *cuts)):
        one = jnp.array([[0, stop - start, 0, start]])
        spans = at(jnp.arange(start, stop))
        out.append(chunk(q[start:stop], k_pages, v_pages, table, one, spans=spans, sinks=sinks))
    rest = jnp.arange(cuts[-1], len(q))
    if len(rest):
        tables = jnp.tile(table, (len(rest), 1))
        out.append(decode(q[cuts[-1] :], k_pages, v_pages, tables, rest + 1, spans=at(rest), sinks=sinks))
    return np.concatenate(out)


def values(seed):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(LENGTH, HEADS * GROUP, WIDTH)).astype(np.float32)
    k, v = rng.normal(size=(2, LENGTH, HEADS, WIDTH)).astype(np.float32)
    return q, k, v


small = st.tuples(st.integers(1, 12), st.integers(0, SPAN_UNITS))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 9),
    st.lists(small, min_size=HEADS, max_size=HEADS),
    st.sampled_from([0, 5]),
    st.sampled_from([(LENGTH,), (9, 30)]),
)
def test_heads_with_spans_are_the_plain_definition_at_any_chunking(seed, own, sinks, cuts):
    own = tuple(Span(sinks, *pair) for pair in own)
    q, k, v = values(seed)
    np.testing.assert_allclose(
        attend(q, k, v, own, sinks, cuts), plain(q, k, v, own, sinks), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("cuts", [(LENGTH,), (9, 30)])
@pytest.mark.parametrize("sinks", [0, 5])
def test_spans_of_the_whole_text_are_dense_bit_for_bit(cuts, sinks):
    own = (Span(sinks, LENGTH, 0), Span(sinks, 0, SPAN_UNITS), Span(sinks, 1, SPAN_UNITS))
    q, k, v = values(3)
    dense = attend(q, k, v, None, 0, cuts)
    assert attend(q, k, v, own, sinks, cuts).tobytes() == dense.tobytes()


def test_heads_come_back_in_the_models_order():
    layer = Layer(spans=(Span(0, 1, 0),) * 4, head_groups=(2, 0, 2, 1))
    q = jax.random.normal(jax.random.key(0), (5, 8, 3))
    parts = [take_heads(q, heads, 4, axis=1) for heads in layer.group_heads.values()]
    assert [part.shape[1] for part in parts] == [2, 2, 4]
    np.testing.assert_array_equal(join_heads(layer, parts), q)


def test_all_layers_make_their_work_lists_at_once(opened):
    """Each page group of each layer gets the list of its own spans, and layers cost no lists of their own."""
    alpha, beta = [[6, 6], [3, 512]], [[0.25, 0.25], [0, 0.125]]
    config = opened(alpha=alpha, beta=beta, sinks=2).model_config
    lengths, workers, made, got = jnp.array([70, 0, 900]), 6, [], []

    one, many = (
        jax.jit(decode_work, static_argnums=(1, 2, 3, 5)),
        jax.jit(stacked_work, static_argnums=(1, 2, 4)),
    )

    def listed(lengths, *, kv_heads, group, spans, sinks, **_):
        made.append(spans.shape)
        with jax.disable_jit(False):
            return many(lengths, kv_heads, workers, spans, sinks)

    def decode(q, k, v, table, lengths, *, work, spans, sinks, **_):
        with jax.disable_jit(False):
            wanted = one(lengths, spans.shape[1], workers, None, spans, sinks)
        for own, whole in zip(
            map(np.asarray, jax.tree.leaves(wanted)), map(np.asarray, jax.tree.leaves(work)), strict=True
        ):
            np.testing.assert_array_equal(own, whole[: len(own)])
        got.append(work)
        return jnp.zeros_like(q)

    kernels = dataclasses.replace(REFERENCE, list_decode_work=listed, decode_attention=decode)
    c = Context(config, kernels)
    groups = len(config.windows)
    batch = Batch(
        token_ids=jnp.zeros(3, jnp.int32),
        positions=lengths - 1,
        slots=jnp.zeros((groups, 3), jnp.int32),
        page_table=jnp.zeros((groups, 3, 15), jnp.int32),
        lengths=lengths,
        num_decodes=jnp.array(3),
        chunks=jnp.zeros((0, 4), jnp.int32),
        sample_tokens=jnp.arange(3),
    )
    shapes = cache_shapes(page_groups(config, jnp.float32, 1), (4,) * groups, 64)
    kv = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    work = ops.attention_work(c, config.layers[0], batch, 0, 3, "decode_attention", kv[0])
    q = jnp.zeros((3, config.num_heads, config.head_dim))
    with jax.disable_jit():  # the lists are compared by value
        for layer, pages in zip(config.layers, kv, strict=True):
            site = Site(c, {}, layer, batch, 0, 3, work)
            ops.decode_attention(site, q, pages)
    assert len(got) == sum(len(layer.group_heads) for layer in config.layers) > 2
    assert len(made) == len({heads for _, _, heads in made}) and sum(shape[0] for shape in made) == len(got)


def test_equal_calls_of_a_kernel_are_traced_once():
    """A Mosaic kernel is compiled for each of its tracings."""
    traced = []

    def kernel(x, *, factor, own):
        traced.append(factor)
        return x * factor + own

    @jax.jit
    def calls(x, own):
        return [
            call_once_traced(kernel, x, factor=factor, own=own + i) for factor in (2, 3) for i in range(4)
        ]

    x = jnp.arange(3.0)
    found = calls(x, jnp.ones(3))
    np.testing.assert_array_equal(np.stack(found), [x * f + 1 + i for f in (2, 3) for i in range(4)])
    assert traced == [2, 3]


def test_a_model_without_a_file_is_unchanged():
    config = open_checkpoint(str(paths.MODELS / MODEL)).model_config
    assert with_spans(EngineConfig("model"), config, MODEL) is config
    assert dataclasses.replace(config).span_classes == ()


def test_a_forward_with_groups_of_heads_is_the_dense_forward_with_masks(opened):
    """Each head reads its own keys through the pages of its own group."""
    tokens, size = 40, 8
    checkpoint = opened(alpha=[[6, 512], [3, 9]], beta=[[0.25, 0], [0, 0.125]], sinks=2)
    config, weights = checkpoint.model_config, checkpoint.load("float32", progress=False)
    number, groups = tokens // size, len(config.windows)
    rng = np.random.default_rng(0)
    table = np.stack([rng.permutation(number + 3)[:number] for _ in range(groups)]).astype(np.int32)
    text, at = jnp.asarray(rng.integers(3, config.vocab_size, tokens)), jnp.arange(tokens)
    batch = Batch(
        token_ids=text,
        positions=at,
        slots=jnp.asarray(table[:, at // size] * size + at % size),
        page_table=jnp.asarray(table[:, None]),
        lengths=jnp.array([tokens]),
        num_decodes=jnp.array(0),
        chunks=jnp.array([[0, tokens, 0, 0]]),
        sample_tokens=jnp.array([tokens - 1]),
    )
    shapes = cache_shapes(page_groups(config, jnp.float32, 1), (number + 3,) * groups, size)
    kv = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    found = transformer.forward(Context(config, REFERENCE), weights, kv, batch)[1]

    layers = iter(config.layers)

    def masked(q, k, v, *_, scale, **settings):
        own = next(layers).spans
        out = plain(
            *(np.asarray(x, np.float64) for x in (q * scale, k[0].swapaxes(0, 1), v[0].swapaxes(0, 1))),
            own,
            2,
        )
        return jnp.asarray(out, jnp.float32)

    dense = open_checkpoint(str(paths.MODELS / MODEL)).model_config
    kernels = dataclasses.replace(
        REFERENCE, chunk_attention=masked, decode_attention=lambda *_, into, **__: into
    )
    one = dataclasses.replace(batch, slots=at[None], page_table=jnp.zeros((1, 1, 1), jnp.int32))
    page = jnp.zeros((1, dense.num_kv_heads, tokens, dense.head_dim))
    wanted = transformer.forward(Context(dense, kernels), weights, [(page, page)] * dense.num_layers, one)[1]
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)
