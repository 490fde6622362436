"""Messages of wrong command lines: each names the flag and what is accepted."""

import pytest
from absl import flags

from jaxflow.cli.flag_errors import flag_error


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--count=x", "flag --count=x: a whole number is accepted"),
        ("--count=1.5", "flag --count=1.5: a whole number is accepted"),
        ("--counts=x", "flag --counts=x: a whole number is accepted"),
        ("--share=x", "flag --share=x: a number is accepted"),
        ("--on=maybe", "flag --on=maybe: true or false is accepted"),
        (
            "--count=1",
            "flag --file is missing, and has no default\nflag --folder is missing, and has no default",
        ),
        ("--kind=x", "flag --kind=x: value should be one of <a|b>"),
        ("--other=1", "Unknown command line flag 'other'"),
    ],
)
def test_a_wrong_flag(argument, says):
    values = flags.FlagValues()
    flags.DEFINE_integer("count", 1, "", flag_values=values)
    flags.DEFINE_multi_integer("counts", [1], "", flag_values=values)
    flags.DEFINE_float("share", 1.0, "", flag_values=values)
    flags.DEFINE_bool("on", True, "", flag_values=values)
    flags.DEFINE_enum("kind", "a", ["a", "b"], "", flag_values=values)
    flags.DEFINE_string("folder", None, "", required=True, flag_values=values)
    flags.DEFINE_string("file", None, "", required=True, flag_values=values)
    with pytest.raises(flags.Error) as refused:
        values(["command", argument])
    assert sorted(flag_error(refused.value).splitlines()) == says.splitlines()
