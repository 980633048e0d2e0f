"""How often the rows of a source come: its weight, honoured exactly over all epochs together.

The rows of a source come in passes, each in an order of its own, and an epoch takes the next `weight` passes: two and a
half of them, or a hundredth of one. What an epoch can't take because it is less than a row is carried over to the next,
so after any number of epochs every row has come as often as any other, or once more. All of it is a function of seed
and epoch alone. Which rows of an epoch come together is `batching`'s work.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Share:
    """A source's part of the data.

    Attributes:
        name: of the source.
        first, end: its rows are those from `first` up to `end`, without it.
        weight: passes over them in an epoch, above 0.
    """

    name: str
    first: int
    end: int
    weight: float = 1.0

    @property
    def rows(self) -> int:
        return self.end - self.first

    @property
    def _pace(self) -> tuple[int, int]:
        """Rows of an epoch as (numerator, denominator): the weight as it was written, not as it is rounded to bits."""
        pace = Fraction(str(self.weight)) * self.rows
        return pace.numerator, pace.denominator

    def drawn(self, epochs: int) -> int:
        """Rows that have come after so many whole epochs: weight * rows * epochs, to the nearest whole row."""
        above, below = self._pace
        return (2 * above * epochs + below) // (2 * below)

    def epochs_for(self, rows: int) -> int:
        """Whole epochs after which so many rows have come."""
        above, below = self._pace
        return -((below - 2 * below * rows) // (2 * above))

    def least_weight(self, epochs: int) -> float:
        """The lowest weight, rounded up to two digits, under which a row comes in so many epochs."""
        exact = Fraction(1, 2 * self.rows * epochs)
        unit = Fraction(1)
        while exact / unit < 10:
            unit /= 10
        while exact / unit >= 100:
            unit *= 10
        return float(-(-exact // unit) * unit)

    def draw(self, seed: int, start: int, stop: int) -> Iterator[int]:
        """The rows from the `start`th that is drawn up to the `stop`th, counted from the run's first; without order
        where a pass is in it as a whole."""
        while start < stop:
            turn, place = divmod(start, self.rows)
            end = min(self.rows, place + stop - start)
            order = list(range(self.first, self.end))
            if end - place < self.rows:
                random.Random(f"{seed}/{self.first}/{turn}").shuffle(order)
            yield from order[place:end]
            start += end - place


def drawn_in(shares: Sequence[Share], seed: int, epoch: int) -> list[int]:
    """The rows of an epoch, sorted; a row that comes twice stands twice."""
    return sorted(row for share in shares for row in share.draw(seed, share.drawn(epoch), share.drawn(epoch + 1)))


def next_filled(shares: Sequence[Share], epoch: int) -> int:
    """The first epoch from this one on that has a row; some share must have rows."""
    return min(share.epochs_for(share.drawn(epoch) + 1) - 1 for share in shares if share.rows)
