"""What `benchmarks/zoo.py` has recorded, as a table and as a part of a page."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

Known = dict[tuple[str, str], dict[str, Any]]
OUTCOMES = ("equal", "close", "refused", "wrong", "crash", "died", "slow", "not run")


def table(known: Known) -> str:
    """Outcomes by number, and every one that is neither equal nor left out."""
    counts = Counter(record["outcome"] for record in known.values())
    trained = sum(count for outcome, count in counts.items() if outcome != "not run")
    lines = [f"{trained} of {len(known)} pairs train in one process."]
    lines += [f"  {outcome:8} {counts[outcome]:5}" for outcome in OUTCOMES if counts[outcome]]
    times = sorted(record["trace_s"] for record in known.values() if "trace_s" in record)
    if times:
        lines.append(f"Trace: median {times[len(times) // 2]:.2f} s, worst {times[-1]:.2f} s.")
    for (kind, name), record in sorted(known.items()):
        if record["outcome"] not in ("equal", "not run"):
            detail = record.get("why") or f"difference {record.get('difference', 0):.1e}"
            lines.append(f"{record['outcome']:8} {kind}/{name}: {detail[:230]}".replace("\n", " "))
    return "\n".join(lines)


def read(records: Path, variant: str = "") -> Known:
    """The last record of each pair under one variant."""
    lines = map(json.loads, records.read_text().splitlines() if records.exists() else [])
    return {(one["type"], one["class"]): one for one in lines if one.get("variant", "") == variant}


_NAMES = {"not run": "does not train in one process"}
BEGIN, _END = "<!-- written by benchmarks/zoo.py -->", "<!-- end -->"
_KINDS = (
    (r"requires the|ImportError", "needs a library that is not installed"),
    (r"million parameters", "is larger than 40 million parameters even when made small"),
    (r"no .* in the configuration", "has another configuration than its type"),
    (r"inputs|input_|specify|argument|no recipe", "needs other inputs than the recipe makes"),
)


def page_text(known: Known, num_pairs: int) -> str:
    """The generated part of the page of models: one line for each model type."""
    trained = {pair: record for pair, record in known.items() if record["outcome"] != "not run"}
    equal = sum(record["outcome"] == "equal" for record in trained.values())
    bits = sum(record.get("difference") == 0.0 for record in trained.values())
    times = sorted(record["trace_s"] for record in trained.values() if "trace_s" in record)
    lines = [
        f"{len(known):,} of {num_pairs:,} pairs of architecture and head were tried, of "
        f"{len({kind for kind, _ in known}):,} model types. {len(trained):,} train "
        f"in one process; **{equal:,} of these ({equal / max(len(trained), 1):.1%}) equal it** on 2 and on 3 "
        f"stages, {bits:,} to the last bit.",
        "",
        "| outcome | pairs |",
        "|---|---|",
        *(f"| {_NAMES.get(o, o)} | {n:,} |" for o, n in _counts(known)),
        f"| not tried | {num_pairs - len(known):,} |",
        "",
        f"Tracing took {times[len(times) // 2]:.2f} s of CPU time in the median, {times[-1]:.1f} s at most "
        f"({len(times):,} pairs).",
        "",
        "### Neither equal nor left out",
        "",
        *(
            f"* `{name}` ({kind}), {record['outcome']}: {told(record)}"
            for (kind, name), record in sorted(trained.items())
            if record["outcome"] != "equal"
        ),
        "",
        "### By model type",
        "",
        "| type | equal | otherwise | not in one process |",
        "|---|---|---|---|",
    ]
    for kind in sorted({kind for kind, _ in known}):
        own = {name: record["outcome"] for (one, name), record in sorted(known.items()) if one == kind}
        columns = [
            [name for name, outcome in own.items() if outcome == "equal"],
            [f"{name} ({o})" for name, o in own.items() if o not in ("equal", "not run")],
            [name for name, outcome in own.items() if outcome == "not run"],
        ]
        lines.append(f"| {kind} | " + " | ".join(", ".join(column) for column in columns) + " |")
    lines += ["", "### Why some do not train in one process", ""]
    reasons = Counter(_reason(record) for record in known.values() if record["outcome"] == "not run")
    lines += [f"* {count:,}: {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def variants_text(records: Path, variants: tuple[str, ...]) -> str:
    """One line for each variant that was run, and each pair that is not equal under it."""
    rows, rest = [], []
    for variant in variants:
        known = read(records, variant)
        trained = {pair: one for pair, one in known.items() if one["outcome"] != "not run"}
        if not trained:
            continue
        equal = sum(one["outcome"] == "equal" for one in trained.values())
        bits = sum(one.get("difference") == 0.0 for one in trained.values())
        rows.append(f"| {variant} | {len(trained)} | {equal} | {bits} |")
        rest += [
            f"* {variant}, `{name}` ({kind}), {one['outcome']}: {told(one)}"
            for (kind, name), one in sorted(trained.items())
            if one["outcome"] != "equal"
        ]
    if not rows:
        return ""
    head = [
        "",
        "",
        "### The same, run in other ways",
        "",
        "| way | pairs | equal | to the last bit |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, *(["", *rest] if rest else [])])


def _counts(known: Known) -> list[tuple[str, int]]:
    found = Counter(record["outcome"] for record in known.values())
    return [(outcome, found[outcome]) for outcome in OUTCOMES if found[outcome]]


def told(record: dict[str, Any]) -> str:
    """Why a record is not equal, in one line."""
    told: str = record.get("why") or f"largest difference {record.get('difference', 0):.1e}"
    return re.sub(r"/\S*/", "", told.replace("\n", " "))[:300]


def _reason(record: dict[str, Any]) -> str:
    why = record["why"]
    return next((text for pattern, text in _KINDS if re.search(pattern, why)), why.partition(":")[0])


def write_page(page: Path, text: str, begin: str = BEGIN) -> None:
    """Put a text between the two marks of a page."""
    head, _, rest = page.read_text().partition(begin)
    assert rest, f"{page} has no {begin}"
    _, _, tail = rest.partition(_END)
    page.write_text(f"{head}{begin}\n\n{text}\n\n{_END}{tail}")
