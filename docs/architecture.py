"""Draw docs/architecture.svg: the rooms of the code, floor by floor, and the journey of a request.

python docs/architecture.py      writes the picture; a test compares it with the committed file
"""

import dataclasses
from html import escape
from pathlib import Path

FLOOR_WIDTH, ANNEX_WIDTH, ROW, GAP, LABEL = 880, 190, 76, 10, 150
INK, FAINT, PAPER, STEP = "#1f2933", "#52606d", "#ffffff", "#b44d12"


@dataclasses.dataclass(frozen=True)
class Room:
    """A box of the drawing.

    text: lines separated by "|". width: relative to its neighbours. step: of a request.
    """

    name: str
    text: str
    width: int = 1
    step: str = ""


@dataclasses.dataclass(frozen=True)
class Floor:
    """One row of rooms. folder: the folder that its rooms are in."""

    title: str
    folder: str
    colour: str
    rooms: tuple[Room, ...]


FLOORS = (
    Floor(
        "roof",
        "jaxflow/bench",
        "#f1f3f5",
        (Room("bench", "engine, kernels, KV tiers, plans: runs, reports, charts"),),
    ),
    Floor(
        "servers",
        "serving",
        "#e3edf9",
        (
            Room("grpc", "service, streams, TLS,|tokens, drain", 3, "1, 8"),
            Room("client", "Python and terminal", 2),
        ),
    ),
    Floor(
        "Python API",
        "jaxflow",
        "#e3edf9",
        (
            Room("llm", "LLM: generate, chat, stream", 3),
            Room("request_output", "text, stop rules, usage", 3, "7"),
            Room("text", "tokenizer, chat templates,|detokenizer", 3, "2"),
        ),
    ),
    Floor(
        "engine",
        "jaxflow",
        "#e2f3e7",
        (
            Room(
                "engine",
                "driver, loop, layout, executor:|step n+1 is dispatched while step n runs",
                5,
                "3, 6",
            ),
            Room("flexgen", "offloaded inference:|a block over device, host, disk", 4),
        ),
    ),
    Floor(
        "work of a step",
        "jaxflow",
        "#fbf1dc",
        (
            Room("scheduler", "waiting and running queues,|admission, chunks", 3, "4"),
            Room("pipeline", "plan (data), compiler,|streams, choice", 3, "5"),
        ),
    ),
    Floor(
        "model and KV",
        "jaxflow",
        "#f6e6ef",
        (
            Room("model", "graph, cost, ops, plain forward;|architectures, checkpoints", 3),
            Room("kv", "pages, prefix cache, device cache;|tiers: host memory, disk", 3),
            Room("parallel", "mesh, collectives", 2),
        ),
    ),
    Floor(
        "kernels",
        "pallas_kernels",
        "#e9e7f7",
        (
            Room("attention", "decode, chunk"),
            Room("gemm", "dense, flat, fp8,|int4, grouped"),
            Room("pointwise", "norm, rope_append,|quantize, sample"),
            Room("kernel_set", "one kernel an op,|fallback reasons"),
            Room("cards", "measured constants|of a device"),
        ),
    ),
)

ANNEX = Floor(
    "search",
    "reads measurements,|writes files",
    "#eceff1",
    (
        Room("profile", "op times, interference,|energy"),
        Room("nanobatch", "MILP: plan.json"),
        Room("placement", "LP: policy.json"),
    ),
)


def _text(x: float, y: float, words: str, size: int, colour: str = INK, weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" font-weight="{weight}">'
        f"{escape(words)}</text>"
    )


def _lines(x: float, y: float, text: str, size: int = 11) -> list[str]:
    return [_text(x, y + 14 * n, line, size, FAINT) for n, line in enumerate(text.split("|"))]


def _room(room: Room, x: float, y: float, width: float, height: float) -> list[str]:
    parts = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
        f'fill="{PAPER}" stroke="{FAINT}"/>',
        _text(x + 8, y + 18, room.name, 13, INK, "bold"),
        *_lines(x + 8, y + 35, room.text),
    ]
    if room.step:
        parts.append(_text(x + width - 8 - 7 * len(room.step), y + 18, room.step, 13, STEP, "bold"))
    return parts


def _floor(floor: Floor, y: float) -> list[str]:
    parts = [
        f'<rect x="0" y="{y:g}" width="{FLOOR_WIDTH}" height="{ROW}" rx="6" fill="{floor.colour}"/>',
        _text(12, y + 30, floor.title, 15, INK, "bold"),
        _text(12, y + 48, floor.folder, 11, FAINT),
    ]
    room_for_rooms = FLOOR_WIDTH - LABEL - GAP * len(floor.rooms)
    x: float = LABEL
    for room in floor.rooms:
        width = room_for_rooms * room.width / sum(r.width for r in floor.rooms)
        parts += _room(room, x, y + 8, width, ROW - 16)
        x += width + GAP
    return parts


def _annex(height: float) -> list[str]:
    left = FLOOR_WIDTH + 3 * GAP
    parts = [
        f'<rect x="{left}" y="0" width="{ANNEX_WIDTH}" height="{height:g}" rx="6" fill="{ANNEX.colour}"/>',
        _text(left + 12, 30, ANNEX.title, 15, INK, "bold"),
        *_lines(left + 12, 48, ANNEX.folder),
    ]
    tall = ROW - 16
    for n, room in enumerate(ANNEX.rooms):
        parts += _room(room, left + 10, 80 + n * (tall + GAP), ANNEX_WIDTH - 20, tall)
    parts += _lines(
        left + 12,
        110 + len(ANNEX.rooms) * (tall + GAP),
        "The engine reads the files.|No room imports search.",
    )
    return parts


def draw() -> str:
    """Return the picture as SVG text."""
    height = len(FLOORS) * (ROW + GAP) - GAP
    width = FLOOR_WIDTH + 3 * GAP + ANNEX_WIDTH
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -10 {width + 20} {height + 44}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="The rooms of JaxFlow, floor by floor">',
        f'<rect x="-10" y="-10" width="{width + 20}" height="{height + 44}" fill="{PAPER}"/>',
    ]
    for n, floor in enumerate(FLOORS):
        parts += _floor(floor, n * (ROW + GAP))
    parts += _annex(height)
    parts.append(
        _text(0, height + 24, "1 to 8: the journey of a request. Imports point down only.", 12, STEP)
    )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
