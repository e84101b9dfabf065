"""The diagrams of docs/concepts/pictures.md, drawn as SVG: `python docs/images/diagrams.py`. They need no script and no
other host to be seen, on a forge or in the site."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
INK, FAINT, BLUE, GREEN, ORANGE, PAPER = "#1f2937", "#9ca3af", "#3b5bdb", "#2b8a3e", "#d9480f", "#ffffff"


class Drawing:
    """Boxes, arrows and words, on paper of their own: a dark page shows them, too."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            'font-family="Helvetica, Arial, sans-serif" font-size="14">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, text: str, colour: str = BLUE) -> None:
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" fill-opacity="0.12" '
            f'stroke="{colour}" stroke-width="1.5"/>'
        )
        self.words(x + width / 2, y + height / 2 + 5, text)

    def words(self, x: float, y: float, text: str, colour: str = INK, anchor: str = "middle", size: int = 14) -> None:
        self._parts.append(
            f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, both: bool = False, dashed: bool = False) -> None:
        start = ' marker-start="url(#tip)"' if both else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.5"{dash}{start} '
            'marker-end="url(#tip)"/>'
        )

    def write(self, name: str) -> None:
        (HERE / f"{name}.svg").write_text("\n".join([*self._parts, "</svg>"]) + "\n")


def one_round() -> None:
    made = Drawing(760, 250, "Two workers train, contribute, and adopt what the server made of it")
    for y, name in ((40, "worker left"), (190, "worker right")):
        made.words(20, y + 22, name, anchor="start")
        made.box(120, y, 210, 34, "H steps of your own loop")
        made.box(560, y, 180, 34, "the next H steps")
    made.words(20, 137, "server", anchor="start")
    made.box(385, 115, 120, 34, "outer step", GREEN)
    made.arrow(330, 60, 410, 112)
    made.arrow(330, 204, 410, 152)
    made.words(398, 80, "Δ", ORANGE, size=18)
    made.words(398, 196, "Δ", ORANGE, size=18)
    made.arrow(490, 115, 556, 62)
    made.arrow(490, 149, 556, 202)
    made.words(510, 80, "θ′", ORANGE, size=18)
    made.words(510, 196, "θ′", ORANGE, size=18)
    made.words(740, 137, "both hold θ′, bit for bit", FAINT, anchor="end")
    made.write("diagram-round")


def streaming() -> None:
    made = Drawing(760, 230, "Blocking: the worker waits for the link. Streaming: fragments travel while it trains")
    made.words(20, 35, "blocking", anchor="start")
    for x in (120, 432):
        made.box(x, 15, 220, 32, "H steps")
        made.box(x + 222, 17, 86, 28, "exchange", ORANGE)
    made.words(389, 68, "the worker waits", FAINT, size=12)
    made.words(20, 135, "streaming", anchor="start")
    made.box(120, 115, 620, 32, "H steps, and the next, and the next")
    for i, x in enumerate((190, 345, 500, 655)):
        made.arrow(x - 25, 147, x - 20, 163)
        made.box(x - 44, 165, 88, 26, f"fragment {i}", ORANGE)
        if x < 600:
            made.arrow(x + 44, 176, x + 66, 150)
            made.words(x + 62, 188, "τ steps", FAINT, anchor="start", size=11)
    made.words(120, 215, "the same bytes in all, spread over the cycle; training does not stop", FAINT, anchor="start")
    made.write("diagram-streaming")


def topologies() -> None:
    made = Drawing(760, 230, "Server, all-reduce, peers, and a hierarchy")
    made.box(65, 30, 70, 30, "server", GREEN)
    for x in (15, 75, 135):
        made.box(x, 130, 50, 30, "w")
        made.arrow(x + 25, 128, 100, 62, both=True)
    made.words(100, 205, "server")
    for x, y in ((215, 40), (315, 40), (215, 130), (315, 130)):
        made.box(x, y, 50, 30, "rank")
    made.arrow(267, 55, 313, 55)
    made.arrow(340, 72, 340, 128)
    made.arrow(313, 145, 267, 145)
    made.arrow(240, 128, 240, 72)
    made.words(290, 205, "all-reduce, torchft")
    for x, y in ((405, 40), (505, 40), (455, 130)):
        made.box(x, y, 50, 30, "peer")
    made.arrow(457, 55, 503, 55, both=True)
    made.arrow(435, 72, 470, 128, both=True)
    made.arrow(525, 72, 490, 128, both=True)
    made.words(480, 205, "peers that vote")
    made.box(625, 20, 60, 28, "top", GREEN)
    for x, name in ((585, "east"), (670, "west")):
        made.box(x, 90, 60, 28, name, GREEN)
        made.arrow(x + 30, 88, 655, 50, both=True, dashed=True)
        for shift in (0, 32):
            made.box(x + shift - 1, 150, 29, 26, "w")
            made.arrow(x + shift + 13, 148, x + 30, 120, both=True)
    made.words(657, 205, "clusters of clusters")
    made.write("diagram-topologies")


def recovery() -> None:
    made = Drawing(760, 190, "A round is on the disk before anybody hears of it")
    steps = (("contributions", BLUE), ("outer step", GREEN), ("journal, synced", ORANGE), ("tell the workers", BLUE))
    for i, (name, colour) in enumerate(steps):
        made.box(20 + 187 * i, 30, 150, 40, name, colour)
        if i:
            made.arrow(20 + 187 * i - 36, 50, 20 + 187 * i - 2, 50)
    made.arrow(394, 122, 394, 76, dashed=True)
    made.words(380, 140, "killed before: the round has not happened; the workers send the same again", FAINT)
    made.words(380, 164, "killed after: it is replayed, bit for bit", FAINT)
    made.write("diagram-recovery")


def shapes() -> None:
    made = Drawing(760, 300, "What each rank of a job holds of a matrix, or of a model, in four shapes")
    colours = [BLUE, GREEN, ORANGE, "#862e9c"]
    for x, name, under in (
        (20, "FSDP2 on 4 ranks", "layers.0.up"),
        (210, "tensor-parallel on 2", "layers.0.down"),
        (400, "FSDP2 × TP, 2×2", "layers.0.up"),
        (590, "2 stages", "the whole model"),
    ):
        made.words(x + 75, 30, name)
        made.words(x + 75, 225, under, FAINT, size=12)
    for rank in range(4):
        made.box(20, 50 + 38 * rank, 150, 36, f"rank {rank}", colours[rank])
    for rank in range(2):
        made.box(210 + 76 * rank, 50, 74, 150, f"rank {rank}", colours[rank])
    for row, (rank, place) in enumerate(((0, "dp0 tp0"), (2, "dp1 tp0"), (1, "dp0 tp1"), (3, "dp1 tp1"))):
        made.box(400, 50 + 38 * row, 150, 36, f"rank {rank} · {place}", colours[rank])
    for rank, lines in enumerate((("table", "layers.0", "layers.1"), ("layers.2", "layers.3", "head"))):
        for row, text in enumerate(lines):
            made.box(590, 50 + 75 * rank + 25 * row, 150, 23, text, colours[rank])
    made.words(380, 262, "each rank sends its boxes as one section; together they send the model once")
    made.words(
        380,
        284,
        "FSDP2 on top of TP cuts each of TP's pieces again: rank 0's rows and rank 1's are not neighbours",
        FAINT,
        size=12,
    )
    made.write("diagram-shapes")


if __name__ == "__main__":
    one_round()
    streaming()
    topologies()
    recovery()
    shapes()
