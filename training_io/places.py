"""Places all over a long row of things, for what shows or samples a few of them.

In: how many there are, and how many are wanted. Out: their numbers, ascending, each once, the first and the last among
them. The promise: they follow from the two numbers alone. Cost: linear in what is wanted.
"""

import numpy as np


def spread_places(num_places: int, most: int) -> list[int]:
    """At most so many (2 or more) of so many places, from all over them: the first and the last are among them.

    >>> spread_places(21, most=5), spread_places(3, most=5), spread_places(0, most=5)
    ([0, 5, 10, 15, 20], [0, 1, 2], [])
    """
    places: list[int] = np.linspace(0, num_places - 1, min(num_places, most)).astype(np.int64).tolist()
    return places
