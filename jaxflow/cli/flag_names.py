"""Spellings of flags: dashes for underscores, and the names that the commands of vLLM use."""

from collections.abc import Iterator, Sequence

from absl import flags

# Names of `vllm bench`, and the flag of the same meaning. A command that has a
# flag of the first name keeps it.
ALIASES = {
    "num_prompts": "num_requests",
    "random_input_len": "input_len",
    "random_output_len": "output_len",
    "seed": "workload_seed",
    "dataset_path": "trace",
    "base_url": "target",
    "result_filename": "output_json",
    "ready_check_timeout_sec": "wait_s",
}


def canonical(argv: Sequence[str], values: flags.FlagValues | None = None) -> list[str]:
    """Return a command line in which each known flag has the name that its command defines.

    `--max-num-seqs` becomes `--max_num_seqs`, `--no-progress` becomes `--noprogress`, and `--num-prompts`
    becomes `--num_requests`. Values, unknown flags and all that follows `--` stay as they are.
    """
    known = flags.FLAGS if values is None else values
    return [*argv[:1], *(word for _, words in arguments_of(argv, known) for word in words)]


def arguments_of(argv: Sequence[str], known: flags.FlagValues) -> Iterator[tuple[str | None, list[str]]]:
    """Yield each argument of a command line: the name of a known flag and its words, or None and other words.

    See `canonical`. All that follows `--` is one argument.
    """
    arguments = iter(argv[1:])
    for argument in arguments:
        if argument == "--":
            yield None, [argument, *arguments]
            return
        name, equals, value = argument.lstrip("-").partition("=")
        found = _name(name, known) if argument.startswith("-") and name else None
        if found is None:
            yield None, [argument]
            continue
        words = [f"--{found}{equals}{value}"]
        if not equals and found in known and not known[found].boolean:
            words += [word for word in [next(arguments, None)] if word is not None]
        yield found, words


def _name(spelling: str, known: flags.FlagValues) -> str | None:
    """Return the flag of a spelling, with `no` in front for a negated one. None: unknown."""
    name = spelling.replace("-", "_")
    for candidate in (name, ALIASES.get(name, "")):
        if candidate in known:
            return candidate
    for prefix in ("no_", "no"):
        positive = name.removeprefix(prefix)
        if name.startswith(prefix) and positive in known and known[positive].boolean:
            return f"no{positive}"
    return None
