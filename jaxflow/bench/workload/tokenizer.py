"""Write a byte-level tokenizer of a model's vocabulary, so that servers of a comparison tokenize alike.

  python -m jaxflow.bench tokenizer --model llama-3.1-8b --folder /tmp/bytes
  python -m serving --model llama-3.1-8b --load_format dummy --tokenizer /tmp/bytes
  python -m jaxflow.bench serve --backend openai-chat --input_len 1024 --output_len 512

The folder is a Hugging Face tokenizer, which other servers read, too. A text of N ASCII letters has N tokens,
and a chat has the tokens of its messages only.
"""

from pathlib import Path
from typing import Any

from absl import flags

from jaxflow.bench.report import machine
from jaxflow.bench.workload.byte_tokenizer import write_tokenizer
from jaxflow.config import ConfigError
from jaxflow.model.checkpoints.checkpoint import open_checkpoint


def define_flags() -> None:
    flags.DEFINE_string("model", None, "Folder, file or name of the model's configuration.")
    flags.DEFINE_integer("vocab_size", None, "Tokens of the vocabulary; default: the model's.", lower_bound=1)
    flags.DEFINE_string("folder", None, "Folder to write; its tokenizer files are replaced.", required=True)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError, CheckpointError, OSError."""
    f = flags.FLAGS
    vocab_size: int | None = f.vocab_size
    if vocab_size is None:
        if f.model is None:
            raise ConfigError("model", None, "a model, or --vocab_size")
        vocab_size = open_checkpoint(f.model, load_format="dummy").model_config.vocab_size
    write_tokenizer(Path(f.folder), vocab_size)
    print(f"wrote a byte-level tokenizer of {vocab_size} tokens to {f.folder}")
    return {"command_name": "tokenizer", **machine.describe(), "vocab_size": vocab_size}
