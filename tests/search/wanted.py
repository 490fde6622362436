"""The page's table of what was wanted and what was reached."""

import paths


def reached(wanted: str) -> str:
    """The rest of the row that begins so: what was reached, and what ended it. Raises: ValueError unless one
    row does.
    """
    table = (
        (paths.ROOT / "docs" / "overlap.md")
        .read_text("utf-8")
        .partition("<!-- wanted -->\n")[2]
        .partition("\n<!-- /wanted -->")[0]
    )
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {wanted}")]
    return row.partition(" | ")[2]
