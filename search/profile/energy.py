"""What work costs a card in joules, fitted to runs that were measured on it: the constants of the fourth
resource.

  python -m search energy --runs benchmarks/settings/h200-energy-runs.json
  python -m search energy --runs benchmarks/settings/h200-energy-runs.json --profile search/profiles/h200-llama-3.1-8b.json --out
  h200.json

A file of runs holds sustained rates of work with the watts and the clock that they settled at, and what is
known of the card (its power cap, idle watts, clocks, FLOPs a cycle). The fit is a bound: it is lowered until
no run needed less. With profiles of `search measure` their products and attention are runs, too, which are
not fitted: one that needed less than the fit says lowers the joules of its own work, a byte's or a FLOP's of
its dtype. The bound is printed beside the one that this release ships for the device, if any, and written in
the form of `jaxflow/model/power`, from where an engine's and a search's bounds come.
"""

from pathlib import Path

import msgspec
from absl import flags

from jaxflow.cli.output_files import check_outputs
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.energy import Power, shipped_power
from jaxflow.model.graph import Widths, model_graph
from search.cost import BYTES
from search.profile.energy_fit import Run, Runs, errors, fit, load_runs, lowered, of_profile
from search.profile.op_times import load_profile

SETTLED = 0.77  # of the highest clock: where an H200's products settle at its cap


def define_flags() -> None:
    flags.DEFINE_string("runs", None, "The sustained runs' file.", required=True)
    flags.DEFINE_list(
        "profile", [], "Profiles of the same device whose entries lower the fit where they needed less."
    )
    flags.DEFINE_string("out", None, "Where the fit is written.")


def entries(measured: Runs, profiles: list[str]) -> list[Run]:
    """The runs of profiles. Raises: ValueError, ProfileError, CheckpointError or OSError, naming the file."""
    found = []
    for one in profiles:
        profile = load_profile(Path(one))
        widths = Widths(weights=BYTES.get(profile.dtype, 2.0), kv=BYTES.get(profile.kv_cache_dtype, 2.0))
        model = open_checkpoint(profile.model, load_format="dummy").model_config
        found += of_profile(measured, profile, model_graph(model, profile.tensor_parallel_size, widths)).runs
    return found


def table(power: Power, shipped: Power | None) -> list[str]:
    """A line for each kind of work: joules at the highest clock, what of them does not fall with it, and
    joules where products settle.
    """
    lines = [f"{'pJ a':>16} {'at 100%':>8} {'fixed':>6} {f'at {SETTLED:.0%}':>8}  shipped"]
    for name, curve in (*power.flop.items(), ("byte", power.byte)):
        theirs = None if shipped is None else shipped.byte if name == "byte" else shipped.flop.get(name)
        known = "-" if theirs is None else f"{1e12 * theirs.joules:.3f}, {theirs.fixed:.0%} fixed"
        lines.append(
            f"{name:>16} {1e12 * curve.joules:8.3f} {curve.fixed:6.0%} "
            f"{1e12 * curve.at(SETTLED):8.3f}  {known}"
        )
    return lines


def run() -> None:
    """The command. Raises: ConfigError, ValueError, CheckpointError, OSError."""
    f = flags.FLAGS
    check_outputs("out")
    measured = load_runs(f.runs)
    found = entries(measured, f.profile)
    power = lowered(fit(measured), found)
    above = errors(msgspec.structs.replace(measured, runs=[*measured.runs, *found]), power)
    print(*table(power, shipped_power(power.device)), sep="\n")
    print(
        f"{len(above)} runs needed {min(above):.3f} to {max(above):.3f} times these joules, "
        f"{sum(above) / len(above):.3f} in the mean"
    )
    if f.out:
        Path(f.out).write_bytes(msgspec.json.format(msgspec.json.encode(power), indent=1) + b"\n")
        print(f"{f.out}: written")
