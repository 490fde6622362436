"""Draws docs/architecture.svg: the floors of the house, and a request's way through them.

python docs/architecture.py      writes the picture; a test holds the committed one to this script
"""

import dataclasses
from html import escape
from pathlib import Path

WIDTH, ROW, GAP, LEFT = 1100, 84, 14, 170
INK, FAINT, PAPER, PATH = "#1f2933", "#61707f", "#ffffff", "#c2410c"


@dataclasses.dataclass(frozen=True)
class Box:
    name: str
    says: str  # lines end at " / "
    width: int  # relative to the other boxes of its floor
    step: str = ""  # its place on a request's way


@dataclasses.dataclass(frozen=True)
class Floor:
    title: str
    note: str
    colour: str
    boxes: tuple[Box, ...]


FLOORS = (
    Floor(
        "bench",
        "jaxflow.bench",
        "#f1f3f5",
        (
            Box(
                "bench",
                "throughput, latency, serve, host, sweep: drives the Python API, or a server over gRPC",
                1,
            ),
        ),
    ),
    Floor(
        "the door",
        "serving",
        "#e7effb",
        (
            Box("service", "gRPC: Generate streams, / Tokenize, GetModel, Admin", 3, "1"),
            Box("streams", "a bounded queue / for each caller", 2, "7"),
            Box("server", "health, reflection, / TLS, tokens, draining", 2),
            Box("client", "Python and / the terminal", 2),
        ),
    ),
    Floor(
        "Python API",
        "jaxflow.llm",
        "#e7effb",
        (
            Box("LLM", "generate, chat, stream", 3),
            Box("text", "tokenizer, chat template, / detokenizer, stop strings", 3, "2"),
        ),
    ),
    Floor(
        "engine",
        "jaxflow.engine",
        "#e6f4ea",
        (
            Box("driver", "the one thread / that owns the engine", 3, "3"),
            Box("loop", "step n+1 is dispatched / while step n runs", 3, "4"),
            Box("scheduler", "decodes first, prefill chunks / fill the batch", 4, "5"),
            Box("executor", "layout in one buffer, / the compiled step", 3, "6"),
        ),
    ),
    Floor(
        "plans",
        "jaxflow.pipeline",
        "#fdf3e1",
        (
            Box("plan", "nano-operations, their token ranges and waits: data", 1),
            Box("compiler", "a plan becomes a jitted step", 1),
        ),
    ),
    Floor(
        "model",
        "jaxflow.model, memory",
        "#fbe9e7",
        (
            Box("ops", "graph and cost, / the plain forward", 2),
            Box("checkpoint", "safetensors, GGUF, / Orbax, dummy", 2),
            Box("sampling", "on the device; a function / of seed and position", 3),
            Box("pages", "allocator, prefix cache", 2),
            Box("kv_cache", "[P, K, S, H] / a layer", 2),
        ),
    ),
    Floor(
        "kernels",
        "pallas_kernels",
        "#efe7f6",
        (Box("kernel_set", "a kernel for each op, or its jnp twin in reference", 1),),
    ),
)


def text(
    x: float,
    y: float,
    content: str,
    size: int,
    colour: str = INK,
    *,
    bold: bool = False,
    anchor: str = "middle",
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}"{weight}>{escape(content)}</text>'
    )


def draw_floor(floor: Floor, top: float) -> list[str]:
    drawn = [
        f'<rect x="10" y="{top:g}" width="{WIDTH - 20}" height="{ROW}" rx="8" fill="{floor.colour}"/>',
        text(26, top + 38, floor.title, 16, bold=True, anchor="start"),
        text(26, top + 58, floor.note, 12, FAINT, anchor="start"),
    ]
    unit = (WIDTH - 20 - LEFT - GAP * len(floor.boxes)) / sum(box.width for box in floor.boxes)
    x = 10.0 + LEFT
    for box in floor.boxes:
        width, lines = unit * box.width, box.says.split(" / ")
        middle = x + width / 2
        drawn.append(
            f'<rect x="{x:.1f}" y="{top + 8:g}" width="{width:.1f}" height="{ROW - 16}" rx="6" '
            f'fill="{PAPER}" stroke="#c9d1d9"/>'
        )
        drawn.append(text(round(middle, 1), top + 30, box.name, 14, bold=True))
        drawn += [text(round(middle, 1), top + 48 + 16 * i, line, 12, FAINT) for i, line in enumerate(lines)]
        if box.step:
            drawn.append(f'<circle cx="{x + 14:.1f}" cy="{top + 22:g}" r="9" fill="{PATH}"/>')
            drawn.append(text(round(x + 14, 1), top + 26, box.step, 12, PAPER, bold=True))
        x += width + GAP
    return drawn


def draw() -> str:
    """The picture, as SVG."""
    bottom = 20 + len(FLOORS) * (ROW + GAP)
    parts = [part for i, floor in enumerate(FLOORS) for part in draw_floor(floor, 10 + i * (ROW + GAP))]
    caption = (
        "Imports point down only (BUILD). The numbers: a request's way in (1 to 6), and its tokens' way "
        "out (7)."
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 24}" '
        f'font-family="system-ui, sans-serif">'
    )
    backdrop = f'<rect width="{WIDTH}" height="{bottom + 24}" fill="{PAPER}"/>'
    return "\n".join([head, backdrop, *parts, text(WIDTH / 2, bottom + 8, caption, 13, FAINT), "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), "utf-8")
