"""Whole pages to their places in all arrays of a cache by one kernel, for Hopper: XLA scatters to each array by a kernel of its own.

A page's string is cut into chunks; a CTA takes a chunk's place of every array, so that the arrays, each a reference of its own, are what is
unrolled and pages and chunks are what is dealt out. Numbers are moved as words, whatever they are.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.reference.scatter_pages import array_words, from_words, words_of
from pallas_kernels.tiles import SMS

_PER_SM = 4  # CTAs dealt out an SM
_CHUNKS = (2048, 1024, 512, 256, 128)  # words of an array that a CTA moves at once: 16 to 1 of a thread
_TOGETHER = 4  # arrays that are read before the first of them is written


def scatter_pages(arrays: Sequence[jax.Array], ids: jax.Array, strings: jax.Array, *, interpret=None) -> list[jax.Array]:
    """The arrays with pages in the places `ids`, of the same meaning as its twin. Donate them: they are written in place.

    Args:
      arrays: [P, ...] each, of any dtype; a page of each a multiple of 128 words of 4 bytes.
      ids: [n] int32, all different; P and above are not there.
      strings: [n, W] uint32, of each page its words in one array after the other.
    Raises:
      ValueError: for a shape that the kernel does not take.
    """
    words = [array_words(array) for array in arrays]
    if not takes(arrays) or strings.shape != (ids.shape[0], sum(words)) or strings.dtype != jnp.uint32:
        given = f"{strings.dtype}{list(strings.shape)} for pages of {words} words"
        raise ValueError(f"strings are {given}: uint32 [n, W], pages of multiples of {_CHUNKS[-1]} words")
    places = max(count // _chunk(count) for count in words)
    ctas = min(ids.shape[0] * places, SMS * _PER_SM)
    kernel = plgpu.kernel(
        functools.partial(_move, words=words, places=places, ctas=ctas),
        out_type=(),
        grid=(ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True),
        kernel_name="scatter_pages",
        interpret=interpret,
    )
    refs = [jax.new_ref(lax.bitcast_convert_type(words_of(array), jnp.int32)) for array in arrays]
    kernel(ids.astype(jnp.int32), lax.bitcast_convert_type(strings, jnp.int32), refs)
    written = [lax.bitcast_convert_type(jax.freeze(ref), jnp.uint32) for ref in refs]
    return [from_words(new, array.shape, array.dtype) for new, array in zip(written, arrays, strict=True)]


def _chunk(words: int) -> int:
    """Of a page of so many words."""
    return next(size for size in _CHUNKS if words % size == 0)


def _move(ids_ref, strings_ref, refs, *, words, places, ctas):
    """This CTA's units, every `ctas`-th: a chunk's place in a page, in all arrays that have so many. places: of the one with most."""
    offsets = [sum(words[:i]) for i in range(len(words))]

    def move(page, place, few, number):
        """few: indices of arrays whose pages are alike. number: of the chunk."""
        chunk = _chunk(words[few[0]])
        begin, layout = number * chunk, plgpu.Layout.WG_STRIDED((chunk,), min(4, chunk // 128))
        read = [plgpu.load(strings_ref.at[page, pl.ds(offsets[i] + begin, chunk)], layout=layout) for i in few]
        for i, values in zip(few, read, strict=True):
            refs[i].at[place, pl.ds(begin, chunk)][...] = values

    @pl.loop(lax.axis_index("cta"), ids_ref.shape[0] * places, step=ctas)
    def _(unit):
        page, number = lax.div(unit, jnp.int32(places)), lax.rem(unit, jnp.int32(places))
        place = ids_ref[page]

        @pl.when((place >= 0) & (place < refs[0].shape[0]))
        def _():
            for size in sorted(set(words)):
                alike = [i for i, count in enumerate(words) if count == size]
                for some in range(0, len(alike), _TOGETHER):
                    few = alike[some : some + _TOGETHER]
                    pl.when(number < size // _chunk(size))(functools.partial(move, page, place, few, number))


def takes(arrays: Sequence[jax.Array]) -> bool:
    """Whether the kernel takes pages of such arrays, of which only shapes and dtypes are looked at."""
    return math.gcd(*(array_words(array) for array in arrays)) % _CHUNKS[-1] == 0
