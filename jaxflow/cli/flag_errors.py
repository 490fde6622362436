"""Errors of a command line that say which value a flag accepts."""

import re

from absl import flags

# absl's words of a value of another type, and what the flag accepts.
_ACCEPTED = {
    r"invalid literal for int\(\) .*": "a whole number is accepted",
    r"could not convert string to float: .*": "a number is accepted",
    r"\('Non-boolean argument to boolean flag', .*\)": "true or false is accepted",
}
_MISSING = re.compile(r"flag --(\w+)=None: Flag --\1 must have a value other than None\.")


def flag_error(error: flags.Error) -> str:
    """Return the message of an error, a line for each flag: its given value, and what is accepted."""
    text = _MISSING.sub(r"flag --\1 is missing, and has no default", str(error).strip())
    for words, accepted in _ACCEPTED.items():
        text = re.sub(words, accepted, text)
    return text
