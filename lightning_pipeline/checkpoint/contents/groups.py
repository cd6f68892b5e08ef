"""The parameter groups of a whole module's optimizer, worked out from those of its stages."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Groups = list[dict[str, Any]]
_WAY_OUT = (
    "resume with PipelineStrategy(stages=1, save_distributed_checkpoint=True), where the order is known, and "
    "save a folder, which is read by name; or give the optimizer self.named_parameters(), so that one-file "
    "checkpoints have names"
)


def whole_groups(
    by_rank: Sequence[Sequence[Any]],
    order: Sequence[str],
    sizes: Sequence[int] | None = None,
    fits: Callable[[Groups], bool] = lambda _: True,
) -> Groups:
    """The groups of the whole module's optimizer from those of the stages.

    A stage sees its own part of each group. Parts of one position belong together where all ranks have as
    many groups, with the same options, or as many as are asked for. Elsewhere the groups were made per layer,
    and follow each other. A group in which several stages have a part is in the order of the module, in its
    reverse, or in that of the names, whichever the parts are in; in the module's where nothing speaks against
    that.

    Args:
        by_rank: The groups of each rank, as `groups_of` gives them.
        order: All parameter names of the module.
        sizes: Parameters in each group, where that is known.
        fits: Whether all else that is known, such as shapes, agrees.

    Raises:
        ValueError: The sizes differ, or no order is surely the right one.
    """
    ranks = _distinct(by_rank)
    found = list(_arrangements(ranks, order, sizes))
    if sizes is not None and found:
        ours = [[len(group["names"]) for group in groups] for _, groups in found]
        found = [pair for pair, size in zip(found, ours, strict=True) if size == list(sizes)]
        if not found:
            raise ValueError(
                f"its parameter groups have {list(sizes)} parameters, this run's have {ours[-1]}"
            )
    found = [(usual, groups) for usual, groups in found if fits(groups)]
    found = [pair for pair in found if pair[0]] or found
    if not found:
        raise ValueError(
            "its parameters and their state are in no order that fits all stages by what these hold and by "
            f"shape: neither the module's, nor its reverse, nor by name: {_WAY_OUT}"
        )
    if any(_names(groups) != _names(found[0][1]) for _, groups in found):
        raise ValueError(
            "its parameters may be in the reverse order of the module or by name, and the parts that stages "
            f"hold do not tell which: {_WAY_OUT}"
        )
    return found[0][1]


def _names(groups: Groups) -> list[list[str]]:
    return [group["names"] for group in groups]


def _distinct(by_rank: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """The groups of one replica: those of the others are the same."""
    return list({repr([group["names"] for group in groups]): groups for groups in by_rank}.values())


def _arrangements(
    ranks: Sequence[Sequence[Any]], order: Sequence[str], sizes: Sequence[int] | None
) -> Iterator[tuple[bool, Groups]]:
    """What the groups may be, and whether the module's order is followed."""
    alike = len({len(groups) for groups in ranks}) == 1
    if sizes is None and alike:
        alike = all(len({repr(g["options"]) for g in same}) == 1 for same in zip(*ranks, strict=True))
    by_position = alike if sizes is None else alike and len(ranks[0]) == len(sizes)
    if not by_position:
        yield from _per_layer(ranks, order)
    if alike:
        yield from _together(ranks, order)


def _per_layer(ranks: Sequence[Sequence[Any]], order: Sequence[str]) -> Iterator[tuple[bool, Groups]]:
    """Each group as its stage has it; the groups forwards or backwards through the module."""
    place = {name: number for number, name in enumerate(order)}

    def first(group: Mapping[str, Any]) -> int:
        return min(place[name] for name in group["names"])

    seen: set[str] = set()
    filled = [_once(groups, seen) for groups in ranks]
    places = [[first(group) for group in groups] for groups in filled]
    for backwards in (False, True):
        if all(own == sorted(own, reverse=backwards) for own in places):
            whole = [group for groups in filled for group in groups]
            yield not backwards, sorted(whole, key=first, reverse=backwards)


def _once(groups: Sequence[Any], seen: set[str]) -> Groups:
    """Groups with names, without those of a shared parameter that another stage listed already."""
    kept = []
    for group in groups:
        names = [name for name in group["names"] if name not in seen]
        seen.update(names)
        if names:
            kept.append({**group, "names": names})
    return kept


def _together(ranks: Sequence[Sequence[Any]], order: Sequence[str]) -> Iterator[tuple[bool, Groups]]:
    """One group from the parts of each position, in each order that all parts are in."""
    shared = {name for name, n in Counter(n for r in ranks for g in r for n in g["names"]).items() if n > 1}
    orders = [list(order), list(order)[::-1], sorted(order), sorted(order, reverse=True)]
    for number, names in enumerate(orders):
        place = {name: position for position, name in enumerate(names)}
        joined = [_joined(same, place, shared) for same in zip(*ranks, strict=True)]
        if None not in joined:
            yield number == 0, [group for group in joined if group is not None]


def _joined(same: Sequence[Any], place: Mapping[str, int], shared: set[str]) -> dict[str, Any] | None:
    """One group from its parts; `None` where a part is in another order."""
    parts = [group for group in same if group["names"]]
    if len(parts) < 2:
        return dict((parts or same)[0])
    for part in parts:
        own = [place[name] for name in part["names"] if name not in shared]
        if own != sorted(own):
            return None
    names = sorted({name for part in parts for name in part["names"]}, key=place.__getitem__)
    called = {name: given for part in parts for name, given in part.get("called", {}).items()}
    return {**parts[0], "names": names, **({"called": called} if called else {})}


def groups_of_file(
    state: Mapping[str, Any],
    by_rank: Sequence[Sequence[Any]],
    order: Sequence[str],
    misplaced: Callable[[Mapping[str, Any]], Sequence[str]],
) -> Groups:
    """The groups in the order of a plain optimizer's `state_dict`, which knows parameters by number.

    Args:
        state: With parameters by number; torch's `param_names` count where it has them.
        by_rank: The groups of each rank, as `groups_of` gives them.
        order: All parameter names of the module.
        misplaced: What does not fit in state by parameter name, told by name.

    Raises:
        ValueError: They do not fit, or no order is surely the right one.
    """
    saved = state["param_groups"]

    def misfits(groups: Groups) -> Sequence[str]:
        pairs = [pair for g, stored in zip(groups, saved, strict=True)
                 for pair in zip(g["names"], stored["params"], strict=True)]  # fmt: skip
        return misplaced({name: state["state"].get(number, {}) for name, number in pairs})

    named = _by_given_names(saved, by_rank)
    if named is None:
        sizes = [len(group["params"]) for group in saved]
        return whole_groups(by_rank, order, sizes, lambda groups: not misfits(groups))
    if wrong := misfits(named):
        raise ValueError(f"wrong shape: {', '.join(wrong)}")
    return named


def _by_given_names(saved: Sequence[Mapping[str, Any]], by_rank: Sequence[Sequence[Any]]) -> Groups | None:
    """The groups by the names that the optimizer was given; `None` where these do not tell."""
    parts = [group for groups in by_rank for group in groups]
    meant: dict[str, str] = {}
    for part in parts:
        called = part.get("called", {})
        for name in part["names"]:
            given = called.get(name, name)
            if meant.setdefault(given, name) != name:
                return None
    if not all(len(group.get("param_names", ())) == len(group["params"]) for group in saved):
        return None
    stored = [given for group in saved for given in group["param_names"]]
    if len(stored) != len(meant) or set(stored) != set(meant):
        return None
    return [{"names": [meant[given] for given in group["param_names"]], "options": {}} for group in saved]
