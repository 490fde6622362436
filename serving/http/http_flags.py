"""The flags of the HTTP server, and the settings that they give."""

from pathlib import Path

from absl import flags

from jaxflow.config import ConfigError
from serving.http.batch_mount import BatchConfig
from serving.http.config import HttpConfig

HTTP = flags.DEFINE_boolean("http", True, "Open the HTTP port, with OpenAI's API.")
HTTP_PORT = flags.DEFINE_integer(
    "http_port", 8000, "Port of the HTTP server. 0: a free port.", lower_bound=0, upper_bound=65535
)
ALLOWED_ORIGINS = flags.DEFINE_list(
    "allowed_origins",
    [],
    "Web origins (https://example.org) whose pages may ask this server. * allows every page. Default: none.",
)
ROOT_PATH = flags.DEFINE_string(
    "root_path", "", "Path under which a proxy shows the HTTP server, as /models/a. Default: no path."
)
BATCH_DIR = flags.DEFINE_string(
    "batch_dir",
    None,
    "Folder of files and batches. Turns /v1/files and /v1/batches on. Unfinished batches of the folder "
    "continue.",
)
BATCH_PRIORITY = flags.DEFINE_integer(
    "batch_priority",
    BatchConfig.priority,
    "Priority of the requests of batches. A higher number runs later; online requests have 0.",
    lower_bound=BatchConfig.priority,
    upper_bound=2**31 - 1,
)
BATCH_WINDOW = flags.DEFINE_integer(
    "batch_window",
    BatchConfig.window,
    "Most requests of batches under way. Use more than --max_num_seqs, so that each step is full.",
    lower_bound=1,
)


def http_from_flags() -> HttpConfig | None:
    """Return the settings of the HTTP server, or None without one. Raises: ConfigError."""
    if not HTTP.value:
        if BATCH_DIR.value is not None:
            raise ConfigError("batch_dir", BATCH_DIR.value, "no folder with --nohttp")
        return None
    batch = None
    if BATCH_DIR.value is not None:
        batch = BatchConfig(Path(BATCH_DIR.value), BATCH_PRIORITY.value, BATCH_WINDOW.value)
    return HttpConfig(
        port=HTTP_PORT.value,
        allowed_origins=tuple(ALLOWED_ORIGINS.value),
        root_path=_root_path(ROOT_PATH.value),
        batch=batch,
    )


def _root_path(path: str) -> str:
    if path and not (path.startswith("/") and path.isascii() and path.isprintable() and "?" not in path):
        raise ConfigError("root_path", path, "a path that begins with /, as /models/a")
    return path
