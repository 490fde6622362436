"""How the tests' programs are compiled for the CPU: in a hurry, since most run once; and what is for those that run often.

Most of the suite's time would be XLA's and LLVM's. Code that nobody optimised, in one piece for a program, and by the emitters
that were there before XLA's present ones, is made in a third of the time, and runs at a half to a tenth of the speed.
"""

import dataclasses
from typing import Any

FLAGS = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
# The same as XLA has them, for one program.
AS_XLA_HAS = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
OFTEN = {"xla_backend_optimization_level": 1}  # a little more care, for one that runs a thousand times or over much
EMITTERS_AS_XLA_HAS = {"xla_backend_extra_options": ""}  # worth their time in large programs


@dataclasses.dataclass(frozen=True)
class Often:
    """A lowered program that will run often: compiled as OFTEN says, unless it is told otherwise."""

    lowered: Any  # jax.stages.Lowered

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Any:
        return self.lowered.compile(compiler_options=OFTEN | (compiler_options or {}))
