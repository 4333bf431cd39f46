"""Colours that colour-blind readers can distinguish (Okabe & Ito), and markers for when they run out."""

LIGHT = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A6D3B", "#7F7F7F", "#6A3D9A")
# The same hues for a dark background: black becomes white, blues and browns become lighter.
DARK = ("#F2F2F2", "#FF8A3D", "#5AB0F0", "#2CC59B", "#E6A3C8", "#FFC24A", "#9AD4FF", "#C9A66B", "#A6A6A6", "#B79AE0")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x")


def colour(number: int, *, dark: bool = False) -> str:
    """Return a colour; the palette repeats."""
    return (DARK if dark else LIGHT)[number % len(LIGHT)]


def marker(number: int) -> str:
    """Return a marker, which changes when the palette repeats."""
    return MARKERS[number // len(LIGHT) % len(MARKERS)]
