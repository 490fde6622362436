"""Answer a file of requests, in the format of OpenAI's batches, and write the answers to another file.

  python -m serving.batch --model FOLDER_OR_FILE_OR_HUB_ID -i in.jsonl -o out.jsonl

The whole input is checked before the model is loaded. Each answer goes to a journal beside the output. A command
that was interrupted or killed continues when it is run again: no finished line runs again. Several processes,
also on several machines with a shared folder, may run the same command at the same time and share the lines.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

import jaxflow.cli.engine_flags
from jaxflow.cli.exit_status import run_command
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.text.chat import read_chat_template
from serving.batch_command import Options, answer_file

if TYPE_CHECKING:
    from jaxflow.llm import LLM

INPUT = flags.DEFINE_string(
    "input_file", None, "File of requests, one JSON object a line.", short_name="i", required=True
)
OUTPUT = flags.DEFINE_string(
    "output_file", None, "File for the answers, in the order of the input.", short_name="o", required=True
)
JOURNAL = flags.DEFINE_string(
    "journal", None, "Folder of the finished answers. Default: the output file's name with .journal."
)
WINDOW = flags.DEFINE_integer(
    "window", None, "Most requests under way. Default: twice the sequences that run at once.", lower_bound=1
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
        template = None if CHAT_TEMPLATE.value is None else read_chat_template(CHAT_TEMPLATE.value)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options = Options(
        input_file=Path(INPUT.value),
        output_file=Path(OUTPUT.value),
        model=config.model,
        served_model_names=tuple(SERVED_MODEL_NAME.value),
        journal=None if JOURNAL.value is None else Path(JOURNAL.value),
        window=WINDOW.value,
        progress=PROGRESS.value,
    )
    return answer_file(options, lambda: load(config, template))


def load(config: EngineConfig, chat_template: str | None) -> "LLM":
    """Return the loaded and warm model. Raises: ConfigError."""
    # JAX takes seconds to import. A wrong input file is refused before.
    from jaxflow.engine.start import freeze_heap
    from jaxflow.llm import LLM

    llm = LLM.from_config(config)
    if chat_template is not None:
        if llm.tokenizer is None:
            raise ConfigError("chat_template", "a file", "no file, because the model has no tokenizer")
        llm.tokenizer = llm.tokenizer.with_chat_template(chat_template)
    freeze_heap()
    return llm


if __name__ == "__main__":
    jaxflow.cli.engine_flags.define_engine_flags()
    flags.adopt_module_key_flags(jaxflow.cli.engine_flags)
    if problem := jaxflow.cli.engine_flags.refused_flag(sys.argv):
        sys.exit(f"error: {problem}")
    run_command(main)
