"""The check of the flags that take a number with a fraction."""

import math
from collections.abc import Collection

from absl import flags


def check_floats(values: flags.FlagValues, infinite: Collection[str] = ()) -> None:
    """Check that every number is finite. absl accepts NaN within any bounds.

    Args:
      infinite: flags that also take infinity, beside those with an infinite default.

    Raises:
      flags.Error: naming the flag.
    """
    for name in values:
        flag = values[name]
        for value in flag.value if isinstance(flag.value, list) else [flag.value]:
            unbounded = name in infinite or (isinstance(flag.default, float) and math.isinf(flag.default))
            if isinstance(value, float) and (
                math.isnan(value) or (math.isinf(value) and not (unbounded and value > 0))
            ):
                raise flags.Error(f"flag --{name}={value}: a finite number is accepted")
