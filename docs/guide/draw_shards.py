"""Draws docs/guide/shards.svg: a column and a row linear on two ranks.

Run it after a change: python docs/guide/draw_shards.py
"""

from pathlib import Path

COLORS = {"both": "#e3e3e3", "0": "#9ec5ee", "1": "#f3c08b"}
parts = list[str]()


def rectangle(x: int, y: int, width: int, height: int, rank: str) -> None:
    parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{COLORS[rank]}" stroke="#444"/>')


def text(x: int, y: int, words: str, size: int = 13) -> None:
    parts.append(f'<text x="{x}" y="{y}" font-size="{size}">{words}</text>')


def sign(x: int, words: str) -> None:
    text(x, 130, words, 20)


rectangle(30, 80, 60, 90, "both")  # x: tokens down, features to the right
text(60, 66, "x")
text(60, 190, "[tokens, 4]", 11)
sign(108, "&#215;")
rectangle(125, 95, 80, 60, "0")  # W1^T [4, 8], its columns cut
rectangle(205, 95, 80, 60, "1")
text(205, 66, "W1: output features are sharded")
text(205, 190, "column linear: no communication", 11)
sign(303, "=")
rectangle(320, 80, 80, 90, "0")
rectangle(400, 80, 80, 90, "1")
text(400, 66, "h")
text(400, 190, "activation: each rank its half", 11)
sign(498, "&#215;")
rectangle(520, 65, 60, 60, "0")  # W2^T [8, 4], its rows cut
rectangle(520, 125, 60, 60, "1")
text(550, 50, "W2: input features are sharded")
text(550, 203, "row linear", 11)
sign(598, "=")
rectangle(615, 80, 60, 90, "0")
sign(690, "+")
rectangle(705, 80, 60, 90, "1")
text(690, 66, "partial sums")
text(690, 190, "one all-reduce adds them", 11)
sign(783, "=")
rectangle(800, 80, 60, 90, "both")
text(830, 66, "y")
text(830, 190, "[tokens, 4]", 11)
for x, rank, words in ((250, "0", "on rank 0"), (400, "1", "on rank 1"), (550, "both", "on both ranks")):
    rectangle(x, 230, 18, 14, rank)
    parts.append(f'<text x="{x + 26}" y="242" font-size="12" text-anchor="start">{words}</text>')

head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 890 260" font-family="sans-serif" text-anchor="middle">'
lines = [head, '<rect width="890" height="260" fill="#fff"/>', *parts, "</svg>"]
(Path(__file__).parent / "shards.svg").write_text("\n".join(lines) + "\n")
