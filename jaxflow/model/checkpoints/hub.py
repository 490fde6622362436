"""Fetches what a model needs from the Hugging Face hub, into its cache."""

from pathlib import Path

from huggingface_hub import snapshot_download

from jaxflow.model.checkpoints.source import CheckpointError

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_OTHERS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)


def download(repo: str, *, weights: bool) -> Path:
    """The folder in the hub's cache with the files of a repository ("owner/name"); only those JaxFlow reads
    are fetched.

    Raises:
      CheckpointError: there is no such repository, no permission, or no connection and not all is in the
      cache.
    """
    patterns = [*_OTHERS, "chat_template*", *(_WEIGHTS if weights else ())]
    try:
        return Path(
            snapshot_download(repo, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"])
        )
    except Exception as error:  # the library raises its own, the HTTP client's and the system's
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{repo}: no folder of this name here, and it cannot be had from the Hugging Face hub ({reason}). "
            "Without a connection, give a folder or a .gguf file, or fetch it into the hub's cache first"
        ) from error
