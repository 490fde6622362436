"""Answer a file of requests, in the format of OpenAI's batches, and write the answers to another file.

  python -m serving.batch --model FOLDER_OR_FILE_OR_HUB_ID -i in.jsonl -o out.jsonl

  python -m serving.batch --engine ray --replicas 8 --ray_address auto --model … -i in.parquet -o out.parquet

The whole input is checked before the model is loaded. Each answer goes to a journal beside the output. A
command that was interrupted or killed continues when it is run again: no finished line runs again. Several
processes, also on several machines with a shared folder, may run the same command at the same time and share
the lines.

With --engine ray the lines go to --replicas engines on a Ray cluster. This command reads the input and writes
the journal and the output. The unfinished lines of a lost engine run again on other engines. Files whose
names end with .parquet have one row for each line. Both need pip install "jaxflow[cluster]".
"""

import sys
from pathlib import Path

from absl import flags

import jaxflow.cli.engine_flags
from jaxflow.cli.exit_status import run_command
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.text.chat import read_chat_template
from serving import ray_flags
from serving.batch_command import Options, answer_file
from serving.batch_engine import LocalEngine, load_model
from serving.batch_on_ray import ray_engine

ENGINE = flags.DEFINE_enum(
    "engine",
    "local",
    ["local", "ray"],
    "local: one engine in this process. ray: --replicas engines, placed by Ray on this machine or on a "
    "cluster.",
)
INPUT = flags.DEFINE_string(
    "input_file",
    None,
    "File of requests: one JSON object a line, or .parquet with the columns custom_id, url and body.",
    short_name="i",
    required=True,
)
OUTPUT = flags.DEFINE_string(
    "output_file",
    None,
    "File for the answers, in the order of the input: JSON lines, or .parquet.",
    short_name="o",
    required=True,
)
JOURNAL = flags.DEFINE_string(
    "journal", None, "Folder of the finished answers. Default: the output file's name with .journal."
)
WINDOW = flags.DEFINE_integer(
    "window",
    None,
    "Most requests under way at an engine. Default: twice the sequences that run at once.",
    lower_bound=1,
)
PROGRESS = flags.DEFINE_boolean("progress", True, "Show a progress bar with the remaining time.")
SERVED_MODEL_NAME = flags.DEFINE_list(
    "served_model_name",
    [],
    "Accepted names of the model, separated by commas. Default: the model's own name.",
)
CHAT_TEMPLATE = flags.DEFINE_string(
    "chat_template", None, "File of a Jinja chat template, instead of the checkpoint's."
)


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    try:
        if len(argv) > 1:
            raise ConfigError("arguments", " ".join(argv[1:]), "flags only")
        config = jaxflow.cli.engine_flags.engine_config_from_flags()
        check_engine(config)
        template = None if CHAT_TEMPLATE.value is None else read_chat_template(CHAT_TEMPLATE.value)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    names = tuple(SERVED_MODEL_NAME.value)
    options = Options(
        input_file=Path(INPUT.value),
        output_file=Path(OUTPUT.value),
        model=config.model,
        served_model_names=names,
        journal=None if JOURNAL.value is None else Path(JOURNAL.value),
        window=WINDOW.value,
        progress=PROGRESS.value,
    )
    if ENGINE.value == "ray":
        return answer_file(options, lambda: ray_engine(config, template, names))
    return answer_file(options, lambda: LocalEngine(load_model(config, template), names))


def check_engine(config: EngineConfig) -> None:
    """Check the flags of the engines. Raises: ConfigError."""
    if ENGINE.value == "local":
        for name in ray_flags.NAMES:
            if flags.FLAGS[name].present:
                raise ConfigError(name, flags.FLAGS[name].value, "no flag without --engine ray")
        return
    if config.coordinator is not None:
        raise ConfigError("coordinator", config.coordinator, "no flag here: a replica is one process")
    if ray_flags.REPLICAS.value < 1:
        raise ConfigError("replicas", ray_flags.REPLICAS.value, "1 or more")
    ray_flags.check_ray("engine", "ray")


if __name__ == "__main__":
    jaxflow.cli.engine_flags.define_engine_flags()
    for module in (jaxflow.cli.engine_flags, ray_flags):
        flags.adopt_module_key_flags(module)
    sys.argv = jaxflow.cli.engine_flags.engine_arguments(sys.argv)
    run_command(main)
