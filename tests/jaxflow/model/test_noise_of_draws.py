"""The law of draws: Gumbel noise is a function of seed, position and token id,
and small errors rarely matter.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hurry import AS_XLA_HAS, OFTEN
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxflow.model import sampling
from jaxflow.model.slot_params import empty_slots, slot_values
from pallas_kernels.pointwise.draw import noise

PLAIN = jax.jit(sampling.plain, compiler_options=AS_XLA_HAS)
FULL = jax.jit(sampling.full, compiler_options=OFTEN)
GUMBEL = jax.jit(sampling.gumbel, compiler_options=AS_XLA_HAS)
VOCABULARIES = [49_152, pytest.param(128_256, marks=pytest.mark.slow)]
FILTERS = [
    {},
    {"top_k": 50},
    {"top_p": 0.9},
    {"min_p": 0.02},
    {"top_k": 200, "top_p": 0.95, "min_p": 0.001},
]


def hash_bits(keys, token):
    return noise.hash_bits(jnp.split(keys, 3, axis=1), token[None])


HASH = jax.jit(hash_bits, compiler_options=AS_XLA_HAS)


def seeds_of(rng, rows):
    return rng.integers(2**32, size=(rows, 2), dtype=np.uint32)


def logits_of(rng, rows, vocab):
    """Return logits with a peak and a long tail, as of a language model."""
    return (rng.normal(size=(rows, vocab)) * 2.5).astype(np.float32)


def full(logits, temperature, seeds, positions, settings):
    """Draw by the full sampler; settings: keyword arguments of each row."""
    rows, vocab = logits.shape
    params, counts = empty_slots(rows, vocab)
    values = [slot_values(**row) for row in settings]
    params = jax.tree.map(
        lambda a, *v: jnp.stack([jnp.asarray(x, a.dtype) for x in v]).reshape(a.shape), params, *values
    )
    slots, asked = np.arange(rows, dtype=np.int32), np.zeros(rows, bool)
    return np.asarray(FULL(logits, temperature, seeds, positions, slots, params, counts, asked)[0])


def test_noise_is_gumbel_distributed():
    """Kolmogorov and Smirnov's distance over a million numbers, and the tails."""
    rng = np.random.default_rng(0)
    numbers = np.asarray(GUMBEL(seeds_of(rng, 64), np.arange(64, dtype=np.int32), np.arange(16_384)))
    ordered = np.sort(np.exp(-np.exp(-numbers.astype(np.float64))), axis=None)
    distance = np.abs(ordered - (np.arange(ordered.size) + 0.5) / ordered.size).max()
    assert distance < 1.95 / np.sqrt(ordered.size)  # exceeded by chance once in a thousand
    peaks = numbers.max(-1) - np.log(16_384)  # the largest of n Gumbel numbers is one, shifted by log n
    assert abs(peaks.mean() - np.euler_gamma) < 4 * np.sqrt(np.pi**2 / 6 / 64)


def test_noise_is_finite_at_the_ends_of_the_hash(monkeypatch):
    ends = jnp.array([[0, 1, 2**24, 2**31, 2**32 - 129, 2**32 - 1]], jnp.uint32)
    monkeypatch.setattr(noise, "hash_bits", lambda words, token: ends)
    numbers = np.asarray(noise.gumbel(jnp.zeros((1, 3), jnp.uint32), jnp.arange(6)))[0]
    bits = np.asarray(ends[0], np.float64)
    exact = -np.log(-np.log1p(-np.minimum((bits + 0.5) / 2**32, 1 - 2**-24)))
    np.testing.assert_allclose(numbers, exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("vocab", [512, 32_768])
def test_bits_of_the_hash_are_fair_and_independent(vocab):
    """Every bit is set half of the time, and no pair of bits agrees more
    often, nor a row with its neighbour.
    """
    rng = np.random.default_rng(1)
    rows = 2**18 // vocab
    keys = rng.integers(2**32, size=(rows, 3), dtype=np.uint32)
    bits = np.asarray(HASH(keys, np.arange(vocab)))
    each = ((bits.reshape(-1, 1) >> np.arange(32, dtype=np.uint32)) & 1).astype(np.float32) - 0.5
    n, most = len(each), 5.5  # deviations, of 1,024 pairs
    assert np.abs(each.mean(0)).max() < most * 0.5 / np.sqrt(n)
    pairs = each.T @ each / n
    np.fill_diagonal(pairs, 0)
    assert np.abs(pairs).max() < most * 0.25 / np.sqrt(n)
    after = each[:-1].T @ each[1:] / n  # of neighbouring tokens
    assert np.abs(after).max() < most * 0.25 / np.sqrt(n)


def test_a_bit_of_seed_position_or_token_changes_half_of_the_noise_bits():
    rng = np.random.default_rng(2)
    rows, tokens = 256, np.arange(64, dtype=np.int32)
    seeds, positions = seeds_of(rng, rows), rng.integers(2**20, size=rows).astype(np.int32)

    @jax.jit
    def bits(seeds, positions, tokens):
        return hash_bits(sampling._row_keys(seeds, positions), tokens)

    plain = np.asarray(bits(seeds, positions, tokens))
    n = rows * len(tokens)
    for what, place in [*((w, b) for w in (0, 1) for b in (0, 13, 31)), ("position", 0), ("position", 12)]:
        changed_seeds, changed = seeds.copy(), positions
        if what == "position":
            changed = positions ^ (1 << place)
        else:
            changed_seeds[:, what] ^= np.uint32(1 << place)
        flips = plain ^ np.asarray(bits(changed_seeds, changed, tokens))
        share = ((flips[..., None] >> np.arange(32, dtype=np.uint32)) & 1).mean((0, 1))
        assert np.abs(share - 0.5).max() < 5 * 0.5 / np.sqrt(n), (what, place)
    for place in range(17):
        flips = plain ^ np.asarray(bits(seeds, positions, tokens ^ (1 << place)))
        share = ((flips[..., None] >> np.arange(32, dtype=np.uint32)) & 1).mean((0, 1))
        assert np.abs(share - 0.5).max() < 5 * 0.5 / np.sqrt(n / 2), place  # pairs of tokens count twice


@pytest.mark.parametrize(
    ("filters", "draws"),
    [
        (None, 128),
        (FILTERS[-1], 64),
        *(pytest.param(each, 256, marks=pytest.mark.slow) for each in FILTERS[1:-1]),
        pytest.param(None, 10_048, marks=pytest.mark.slow),
    ],
)
def test_noise_in_the_logits_changes_few_draws(filters, draws):
    """Noise of 1e-5 changes at most one of 10,000 draws, and noise of 1e-3 about one of 1,000."""
    rng = np.random.default_rng(3)
    rows = 64
    changed = dict.fromkeys((1e-5, 1e-3), 0)
    for block in range(draws // rows):
        logits = logits_of(rng, rows, 49_152)
        position = np.full(rows, block, np.int32)
        others = (np.ones(rows, np.float32), seeds_of(rng, rows), position)

        def draw(x, others=others):
            return np.asarray(PLAIN(x, *others)) if filters is None else full(x, *others, [filters] * rows)

        plain = draw(logits)
        for error in changed:
            moved = logits + error * rng.normal(size=logits.shape).astype(np.float32)
            changed[error] += int((draw(moved) != plain).sum())
    assert changed[1e-5] <= 1, changed
    assert changed[1e-3] <= 3 + 0.003 * draws, changed


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_row_alone_is_the_row_in_a_batch(vocab):
    """Under all filters, with a rounding error as a GEMM of another batch size has it."""
    rng = np.random.default_rng(4)
    rows = 64
    logits, seeds = logits_of(rng, rows, vocab), seeds_of(rng, rows)
    settings = [FILTERS[i % len(FILTERS)] for i in range(rows)]
    temperature = rng.choice([0.0, 0.7, 1.0, 1.3], rows).astype(np.float32)
    position = rng.integers(1, 4096, rows).astype(np.int32)
    together = full(logits, temperature, seeds, position, settings)
    for start in range(0, rows, 4):
        part = slice(start, start + 1)
        error = 1e-6 * rng.normal(size=(1, vocab)).astype(np.float32)
        apart = full(logits[part] + error, temperature[part], seeds[part], position[part], settings[part])
        assert apart.tolist() == together[part].tolist()


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_draws_of_a_large_vocabulary_fall_as_the_probabilities_say(vocab):
    """Chi-square over 40 groups of tokens of nearly equal mass."""
    rng = np.random.default_rng(5)
    logits = logits_of(rng, 1, vocab)[0]
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    group = np.minimum((np.cumsum(p) * 40).astype(int), 39)
    rows, blocks = 64, 8
    seen = np.zeros(40)
    for block in range(blocks):
        position = np.arange(rows, dtype=np.int32) + block * rows
        seeds = np.tile(np.array([[7, 0]], np.uint32), (rows, 1))
        tokens = np.asarray(PLAIN(np.tile(logits, (rows, 1)), np.ones(rows, np.float32), seeds, position))
        np.add.at(seen, group[tokens], 1)
    expected = np.bincount(group, p, 40) * rows * blocks
    chi = ((seen - expected) ** 2 / expected).sum()
    assert chi < 39 + 4 * np.sqrt(2 * 39)


@pytest.mark.parametrize("devices", [2, 4])
def test_a_sharded_and_padded_vocabulary_gives_the_same_draws(devices):
    rng = np.random.default_rng(6)
    rows, vocab = 16, 1000
    logits = logits_of(rng, rows, vocab)
    others = (
        rng.uniform(0, 2, rows).astype(np.float32),
        seeds_of(rng, rows),
        np.arange(rows, dtype=np.int32),
    )
    padded = np.pad(logits, ((0, 0), (0, 1024 - vocab)), constant_values=-np.inf)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tp",))
    sharded = jax.device_put(padded, NamedSharding(mesh, PartitionSpec(None, "tp")))
    assert PLAIN(sharded, *others).tolist() == PLAIN(logits, *others).tolist()
