"""Colours that the colour-blind can tell apart (Okabe & Ito), and what tells curves apart when they run out."""

LIGHT = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A6D3B", "#7F7F7F", "#6A3D9A")
# The same hues on a dark ground: black becomes white, blues and browns lighter.
DARK = ("#F2F2F2", "#FF8A3D", "#5AB0F0", "#2CC59B", "#E6A3C8", "#FFC24A", "#9AD4FF", "#C9A66B", "#A6A6A6", "#B79AE0")
MARKS = ("circle", "square", "diamond", "triangle-up", "x")


def colour(number: int, *, dark: bool = False) -> str:
    palette = DARK if dark else LIGHT
    return palette[number % len(palette)]


def mark(number: int) -> str:
    """A marker that changes when the colours begin again."""
    return MARKS[number // len(LIGHT) % len(MARKS)]
