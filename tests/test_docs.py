"""What the repository says of itself is so."""

import runpy

import paths


def architecture():
    return runpy.run_path(str(paths.ROOT / "docs" / "architecture.py"))


def test_the_picture_is_what_its_script_draws():
    assert (paths.ROOT / "docs" / "architecture.svg").read_text("utf-8") == architecture()["draw"]()


def test_the_picture_shows_rooms_that_there_are():
    modules = {
        part
        for path in paths.ROOT.glob("*/**/*.py")
        for part in path.relative_to(paths.ROOT).with_suffix("").parts
    }
    shown = {box.name.lower() for floor in architecture()["FLOORS"] for box in floor.boxes}
    assert shown <= modules
