"""Numbers that callbacks want of all ranks: one exchange for all of them, while the next batch runs."""

from collections.abc import Callable, Sequence

Gathered = list[list[list[float]]]  # by replica, pipeline rank, and place
Begin = Callable[[Sequence[float]], Callable[[], Gathered]]


class Exchange:
    """Gathers what several callbacks tell, without waiting for other ranks. All ranks tell the same things.

    A batch's end tells, the start of the next batch sends, and its end, when all ranks have long sent theirs,
    receives.

    Args:
        begin: Begins to gather numbers of all ranks; gives what waits for them.
    """

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._told: list[tuple[list[float], Callable[[Gathered], None]]] = []
        self._under_way: tuple[list[tuple[int, Callable[[Gathered], None]]], Callable[[], Gathered]] | None
        self._under_way = None

    def tell(self, numbers: Sequence[float], receive: Callable[[Gathered], None]) -> None:
        """Have numbers gathered in the next exchange.

        Args:
            numbers: Of this rank; as many as on the others.
            receive: Called with those of all ranks.
        """
        self._told.append((list(numbers), receive))

    def send(self) -> None:
        """Begin to exchange what was told, if something was."""
        if self._told and self._under_way is None:
            told, self._told = self._told, []
            parts = [(len(numbers), receive) for numbers, receive in told]
            self._under_way = parts, self._begin([number for numbers, _ in told for number in numbers])

    def receive(self) -> None:
        """Hand out what was sent, if something was."""
        if self._under_way is not None:
            (parts, wait), self._under_way = self._under_way, None
            gathered, begin = wait(), 0
            for count, receive in parts:
                receive([[own[begin : begin + count] for own in ranks] for ranks in gathered])
                begin += count

    def finish(self) -> None:
        """Exchange now what was told, and wait for it."""
        self.receive()
        self.send()
        self.receive()

    def drop(self) -> None:
        """Forget everything: the run has ended by an exception."""
        self._told, self._under_way = [], None
