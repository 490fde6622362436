"""Compile a model's programs into a folder, so that later starts find them.

  python -m jaxflow.compile --model MODEL --out FOLDER

The command starts an engine with the given flags and ends it. A server with the same flags and
`--compilation_cache_dir FOLDER` then reads its programs from the folder. The folder serves machines with the
same kind of GPU, the same driver and the same versions of JaxFlow and JAX, for example containers of one
image. A program that does not fit is compiled again. `--load_format dummy` reads no weights. The folder also
holds the programs that an engine compiles while it serves.
"""

import sys
import time
from pathlib import Path

from absl import flags

import jaxflow.cli.engine_flags
from jaxflow.cli.engine_flags import define_engine_flags, engine_config_from_flags
from jaxflow.cli.exit_status import run_command
from jaxflow.config import ConfigError
from jaxflow.engine.deferred import wait_until_compiled
from jaxflow.llm import LLM
from jaxflow.model.checkpoints.source import CheckpointError
from jaxflow.pipeline.plan import PlanError


def main(argv: list[str]) -> int:
    """Run the command and return its exit status: 2 for a wrong setting."""
    try:
        if len(argv) > 1:
            raise ConfigError("arguments", " ".join(argv[1:]), "flags only")
        folder = Path(flags.FLAGS.out)
        compile_into(folder)
    except (CheckpointError, ConfigError, PlanError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    print(
        f"{folder}: {sum(files) / 1e6:.0f} MB in {len(files)} files; serve with --compilation_cache_dir "
        f"{folder}"
    )
    return 0


def compile_into(folder: Path) -> None:
    """Start an engine with the flags' settings and the folder as its cache, and end it.

    Raises:
      ConfigError: a setting is not accepted, or another cache folder is given.
      CheckpointError, PlanError: a file is damaged or of another model.
      OSError: the folder cannot be written, or the model cannot be read.
    """
    given = flags.FLAGS["compilation_cache_dir"].value
    if given is not None and Path(given) != folder:
        raise ConfigError("compilation_cache_dir", given, "unset, because --out is the folder")
    flags.FLAGS["compilation_cache_dir"].value = str(folder.resolve())
    config = engine_config_from_flags()
    folder.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    with LLM.from_config(config, progress=sys.stderr.isatty()):
        print(f"the engine started in {time.monotonic() - began_s:.0f} s", file=sys.stderr)
        wait_until_compiled()
    print(f"all programs are compiled after {time.monotonic() - began_s:.0f} s", file=sys.stderr)


def define_flags() -> None:
    define_engine_flags()
    flags.DEFINE_string("out", None, "Folder of the programs. Made if it is missing.", required=True)


if __name__ == "__main__":
    define_flags()
    flags.adopt_module_key_flags(jaxflow.cli.engine_flags)
    sys.argv = jaxflow.cli.engine_flags.engine_arguments(sys.argv)
    run_command(main)
