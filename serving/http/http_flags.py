"""The flags of the HTTP server, and the settings that they give."""

from absl import flags

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


def http_from_flags() -> HttpConfig | None:
    """Return the settings of the HTTP server, or None without one."""
    if not HTTP.value:
        return None
    return HttpConfig(HTTP_PORT.value, tuple(ALLOWED_ORIGINS.value), ROOT_PATH.value)
