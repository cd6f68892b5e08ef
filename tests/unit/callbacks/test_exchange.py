"""What callbacks tell is gathered in one exchange, which begins at the next batch and ends with it."""

from collections.abc import Callable, Sequence

from lightning_pipeline.measure import Exchange, Gathered


class Ranks:
    """Two ranks of one replica, of which the other tells ten times as much."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def begin(self, numbers: Sequence[float]) -> Callable[[], Gathered]:
        self.did.append(f"sent {list(numbers)}")

        def wait() -> Gathered:
            self.did.append("waited")
            return [[list(numbers), [10 * number for number in numbers]]]

        return wait


def test_what_two_callbacks_tell_travels_together_and_comes_back_apart() -> None:
    ranks, found = Ranks(), []
    exchange = Exchange(ranks.begin)
    exchange.receive()  # a batch ends
    exchange.tell([1.0, 2.0], lambda gathered: found.append(("bubble", gathered)))
    exchange.tell([3.0], lambda gathered: found.append(("memory", gathered)))
    assert ranks.did == []
    exchange.send()  # the next one begins, for both callbacks
    exchange.send()
    assert (ranks.did, found) == (["sent [1.0, 2.0, 3.0]"], [])
    exchange.receive()
    exchange.receive()
    assert found == [("bubble", [[[1.0, 2.0], [10.0, 20.0]]]), ("memory", [[[3.0], [30.0]]])]
    assert ranks.did == ["sent [1.0, 2.0, 3.0]", "waited"]


def test_the_end_of_an_epoch_does_not_wait_for_a_next_batch() -> None:
    ranks, found = Ranks(), []
    exchange = Exchange(ranks.begin)
    exchange.tell([1.0], found.append)
    exchange.send()
    exchange.tell([2.0], found.append)
    exchange.finish()
    assert found == [[[[1.0], [10.0]]], [[[2.0], [20.0]]]]


def test_a_run_that_failed_is_forgotten() -> None:
    ranks, found = Ranks(), []
    exchange = Exchange(ranks.begin)
    exchange.tell([1.0], found.append)
    exchange.send()
    exchange.tell([2.0], found.append)
    exchange.drop()
    exchange.finish()
    assert (ranks.did, found) == (["sent [1.0]"], [])
