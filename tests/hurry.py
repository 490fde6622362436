"""How the tests' programs are compiled for the CPU: in a hurry, since most run once; and what is for those
that run often.

Most of the suite's time would be XLA's and LLVM's. Code that nobody optimised, in one piece for a program,
and by the emitters that were there before XLA's present ones, is made in a third of the time, and runs at a
half to a tenth of the speed.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

FLAGS = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
# The same as XLA has them, for one program.
AS_XLA_HAS = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
OFTEN = {
    "xla_backend_optimization_level": 1
}  # a little more care, for one that runs a thousand times or over much
EMITTERS_AS_XLA_HAS = {"xla_backend_extra_options": ""}  # worth their time in large programs


@dataclasses.dataclass(frozen=True)
class Often:
    """A lowered program that will run often: compiled as OFTEN says, unless it is told otherwise."""

    lowered: Any  # jax.stages.Lowered

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Any:
        return self.lowered.compile(compiler_options=OFTEN | (compiler_options or {}))


@contextlib.contextmanager
def compiled_with(options: Mapping[str, Any]) -> Iterator[None]:
    """While the block runs, engines compile their programs with these options, unless they tell otherwise."""
    from jaxflow.engine.executor import Executor  # what is in FLAGS must be said before JAX is there

    compiled = Executor._compile
    with mock.patch.object(
        Executor,
        "_compile",
        lambda self, lowered, given=None: compiled(self, lowered, {**options, **(given or {})}),
    ):
        yield
