"""The documentation names files, commands and numbers that exist."""

import re
import runpy

import layers
import paths
import pytest

PAGES = sorted(
    [*(paths.ROOT / "docs").glob("*.md"), *(paths.ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]
)
NOTES = sorted((paths.ROOT / "benchmarks" / "notes").glob("*.md"))
ROOTS = ("jaxflow", "pallas_kernels", "search", "serving", "tests", "benchmarks", "docs", "notebooks")


def architecture():
    return runpy.run_path(str(paths.ROOT / "docs" / "architecture.py"))


def test_the_picture_is_the_output_of_its_script():
    assert (paths.ROOT / "docs" / "architecture.svg").read_text("utf-8") == architecture()["draw"]()


def test_the_rooms_of_the_picture_exist():
    script = architecture()
    found = {part for source in layers.sources(paths.ROOT) for part in source.removesuffix(".py").split("/")}
    assert {room.name for floor in (*script["FLOORS"], script["ANNEX"]) for room in floor.rooms} <= found


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: page.stem)
def test_links_and_paths_exist(page):
    text = page.read_text("utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    named = re.findall(rf"`((?:{'|'.join(ROOTS)})/[\w/.-]*)`", text)
    assert [name for name in named if not (paths.ROOT / name).exists()] == []


def anchors(page):
    """Return the anchors of a page's headings, as GitHub makes them of the headings' words."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    words = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in words}


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: page.stem)
def test_headings_that_links_name_exist(page):
    links = re.findall(r"\]\(([^)#:]*\.md)?#([^)]+)\)", page.read_text("utf-8"))
    named = [(page.parent / name if name else page, anchor) for name, anchor in links]
    assert [(str(target), anchor) for target, anchor in named if anchor not in anchors(target)] == []


def test_pages_stay_short():
    lines = {page.name: len(page.read_text("utf-8").splitlines()) for page in PAGES}
    assert lines["README.md"] <= 130
    assert {name: n for name, n in lines.items() if n > 150} == {}


def test_the_index_lists_every_page():
    index = (paths.ROOT / "docs" / "index.md").read_text("utf-8")
    assert [page.name for page in PAGES if page.parent.name == "docs" and f"({page.name})" not in index] == [
        "index.md"
    ]
