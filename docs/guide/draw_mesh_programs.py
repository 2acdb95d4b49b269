"""Draws the pictures of the programs on a mesh of the gallery, docs/guide/mesh_*.svg, on four devices, x = y = 2.

Run it after a change: python docs/guide/draw_mesh_programs.py
"""

from pathlib import Path

COLORS = ["#9ec5ee", "#f3c08b", "#a8d5a2", "#d9b3e0"]  # of the device 2 x + y
GREY = "#e3e3e3"  # a block that all devices have
Block = tuple[int, ...]  # the devices that have it

ALL = (0, 1, 2, 3)
FULL = [[ALL]]
COLUMNS = [[(0,), (1,), (2,), (3,)]]
ROWS = [[(0,)], [(1,)], [(2,)], [(3,)]]
BLOCKS = [[(0,), (1,)], [(2,), (3,)]]
BY_X = [[(0, 1)], [(2, 3)]]  # cut in rows over x, the same along y
BY_Y = [[(0, 2), (1, 3)]]  # cut in columns over y, the same along x


class Picture:
    """A row of matrices and words, from left to right."""

    def __init__(self) -> None:
        self.x, self.parts = 20, list[str]()

    def text(self, x: float, y: float, words: str, size: int = 12) -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}">{words}</text>')

    def rectangle(self, x: float, y: float, width: float, height: float, color: str, line: str = "#444") -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{color}" stroke="{line}"/>'
        )

    def block(self, x: float, y: float, width: float, height: float, devices: Block) -> None:
        """Stripes in the colors of the devices."""
        colors = [GREY] if devices == ALL else [COLORS[device] for device in devices]
        for k, color in enumerate(colors):
            self.rectangle(x + k * width / len(colors), y, width / len(colors), height, color, color)
        self.rectangle(x, y, width, height, "none")

    def matrix(self, name: str, width: int, height: int, blocks: list[list[Block]], below: str = "") -> None:
        top = 90 - height / 2
        for i, row in enumerate(blocks):
            for j, devices in enumerate(row):
                w, h = width / len(row), height / len(blocks)
                self.block(self.x + j * w, top + i * h, w, h, devices)
        self.text(self.x + width / 2, top - 8, name)
        self.text(self.x + width / 2, top + height + 16, below, 11)
        self.x += width + 12

    def sign(self, words: str, width: int = 24) -> None:
        self.text(self.x + width / 2, 96, words, 18 if len(words) < 3 or words.startswith("&#215") else 12)
        self.x += width + 12

    def save(self, name: str) -> None:
        for device, color in enumerate(COLORS):
            self.rectangle(20 + 110 * device, 168, 16, 12, color)
            self.text(85 + 110 * device, 178, f"x = {device // 2}, y = {device % 2}", 11)
        self.rectangle(460, 168, 16, 12, GREY)
        self.text(515, 178, "all devices", 11)
        width = max(self.x + 10, 570)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 195" font-family="sans-serif"'
        lines = [f'{head} text-anchor="middle">', f'<rect width="{width}" height="195" fill="#fff"/>', *self.parts]
        (Path(__file__).parent / f"mesh_{name}.svg").write_text("\n".join([*lines, "</svg>"]) + "\n")


def matmul() -> None:
    picture = Picture()
    for name, a, b, c, communication in (
        ("by columns", FULL, COLUMNS, COLUMNS, "none"),
        ("by rows", ROWS, FULL, ROWS, "none"),
        ("by contraction", COLUMNS, ROWS, FULL, "psum"),
    ):
        picture.text(picture.x + 112, 30, name, 13)
        picture.matrix("a", 60, 60, a)
        picture.sign("&#215;", 10)
        picture.matrix("b", 60, 60, b, f"communication: {communication}")
        picture.sign("=", 10)
        picture.matrix("c", 60, 60, c)
        picture.x += 35
    picture.save("matmul")


def layers() -> None:
    picture = Picture()
    picture.matrix("x", 50, 70, FULL)
    picture.sign("&#215;")
    picture.matrix("w1: columns", 100, 50, COLUMNS)
    picture.sign("relu", 34)
    picture.matrix("h", 100, 70, COLUMNS, "no communication")
    picture.sign("&#215;")
    picture.matrix("w2: rows", 50, 100, ROWS)
    picture.sign("=")
    picture.matrix("y", 50, 70, FULL, "psum")
    picture.save("layers")


def vectors() -> None:
    picture = Picture()
    picture.matrix("a", 14, 90, BY_X)
    picture.sign("·", 10)
    picture.matrix("b", 14, 90, BY_X)
    picture.sign("=", 10)
    picture.matrix("sum", 16, 16, FULL, "psum over x")
    picture.x += 90
    picture.matrix("batch", 60, 90, ROWS)
    picture.sign("&#215;")
    picture.matrix("w", 60, 60, FULL, "its gradient: a sum")
    picture.sign("mean of squares", 100)
    picture.matrix("loss", 16, 16, FULL, "pmean")
    picture.save("vectors")


def two_axes() -> None:
    picture = Picture()
    picture.matrix("x", 60, 70, BLOCKS)
    picture.sign("gather over y &#8594;", 100)
    picture.matrix("rows of x", 60, 70, BY_X)
    picture.sign("&#215;")
    picture.matrix("columns of w", 100, 60, BY_Y)
    picture.sign("&#8592; gather over x", 100)
    picture.matrix("w", 100, 60, BLOCKS)
    picture.sign("=")
    picture.matrix("x w", 100, 70, BLOCKS, "cut as x")
    picture.save("two_axes")


def towers() -> None:
    picture = Picture()
    picture.matrix("images", 40, 80, BY_X)
    picture.sign("conv 1", 46)
    picture.matrix("channels", 80, 80, BLOCKS)
    picture.sign("conv 2: own tower", 104)
    picture.matrix("channels", 80, 80, BLOCKS)
    picture.sign("gather over y", 82)
    picture.matrix("all channels", 80, 80, BY_X)
    picture.sign("conv 3", 46)
    picture.matrix("channels", 80, 80, BLOCKS)
    picture.save("towers")


def pipeline() -> None:
    picture = Picture()
    picture.text(60, 30, "tick", 12)
    for tick in range(5):
        picture.text(135 + 70 * tick, 30, str(tick))
    for stage in range(2):
        y = 45 + 50 * stage
        picture.text(60, y + 22, f"stage x = {stage}")
        for tick in range(5):
            if 0 <= tick - stage < 4:
                picture.block(103 + 70 * tick, y, 64, 34, ((0, 1), (2, 3))[stage])
                picture.text(135 + 70 * tick, y + 22, f"batch {tick - stage}")
    for tick in range(4):
        x = 135 + 70 * tick
        picture.parts.append(f'<path d="M{x} 79 L{x + 66} 94" stroke="#444"/>')
    picture.text(530, 90, "ppermute: to the next stage", 11)
    picture.x = 610
    picture.save("pipeline")


for draw in (matmul, layers, vectors, two_axes, towers, pipeline):
    draw()
