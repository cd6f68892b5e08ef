"""Whether an exception is every rank's: raised by all at the same point, so that all still answer."""

import time

from lightning_pipeline.ranks.notes import CAUSE, Notes

_PATIENCE_SECONDS = 0.5  # for ranks that raise the same a little later; others are told after that
_NAP = 0.005
_VERDICT = "ends/verdict"


def all_end_alike(notes: Notes, rank: int, size: int, place: str, seconds: float = _PATIENCE_SECONDS) -> bool:
    """Whether all ranks have raised at one place. All that ask get the same answer.

    Args:
        notes: Of the run.
        rank: This global rank.
        size: Of the world.
        place: What was raised and where, in words.
        seconds: How long the others have.
    """
    keys = [f"ends/{number}" for number in range(size)]
    notes.put(keys[rank], place)
    until = time.monotonic() + seconds
    while True:
        found = notes.get_all([*keys, CAUSE, _VERDICT])
        if _VERDICT in found:
            return found[_VERDICT] == "alike"
        places = [found[key] for key in keys if key in found]
        if len(places) == size or CAUSE in found or len(set(places)) > 1 or time.monotonic() > until:
            alike = places == [place] * size and CAUSE not in found
            return notes.put_first(_VERDICT, "alike" if alike else "apart") == "alike"
        time.sleep(_NAP)
