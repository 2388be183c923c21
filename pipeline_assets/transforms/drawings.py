"""Drawings of a pack, as SVG that is made of numbers alone: its segments as blocks, and who may attend to whom.

In: lengths of a pack's segments in tokens, in order. Out: one SVG element whose units are tokens. Cost: one element a
segment.
"""

from collections.abc import Iterator, Sequence

COLOURS = ("#2a7de1", "#c4622a", "#2b8a60", "#b0559e", "#94750f", "#1d7f8c", "#8a6d5a", "#6a6cc8")
PAPER = "#eef1f4"


def pack_svg(segment_lengths: Sequence[int], capacity: int) -> str:
    """A pack as a bar of its capacity: one `rect` a segment, as wide as it has tokens; what is empty stays blank."""
    total = sum(segment_lengths)
    width = max(capacity, total, 1)
    blocks = "".join(
        f'<rect x="{start}" y="0" width="{end - start}" height="1" fill="{colour}"/>'
        for start, end, colour in _spans(segment_lengths)
    )
    paper = f'<path d="M0 0H{width}V1H0Z" fill="{PAPER}"/>'
    return f'{_opened(width, 1)} preserveAspectRatio="none">{paper}{blocks}</svg>'


def attention_svg(segment_lengths: Sequence[int]) -> str:
    """Queries down, keys across: one `polygon` a segment covers the pairs that attend, each token to those before it.

    A cell is within it exactly when its centre is: the slope runs half a cell behind the diagonal.
    """
    width = max(sum(segment_lengths), 1)
    blocks = "".join(
        f'<polygon points="{start},{start} {start}.5,{start} {end},{end - 1}.5 {end},{end} {start},{end}"'
        f' fill="{colour}"/>'
        for start, end, colour in _spans(segment_lengths)
    )
    paper = f'<path d="M0 0H{width}V{width}H0Z" fill="{PAPER}"/>'
    return f"{_opened(width, width)}>{paper}{blocks}</svg>"


def _opened(width: int, height: int) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" aria-hidden="true"'


def _spans(segment_lengths: Sequence[int]) -> Iterator[tuple[int, int, str]]:
    """Where each segment starts and ends in its pack, and a colour that its neighbours have not."""
    start = 0
    for number, length in enumerate(segment_lengths):
        yield start, start + length, COLOURS[number % len(COLOURS)]
        start += length
