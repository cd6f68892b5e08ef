"""The code blocks of README.md and docs/, for the tests that read and run them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(
    r"^(?:<!-- runs(?P<given> with)?(?P<ranks>: \d)? -->\n(?P<runs>))?```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.S | re.M,
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        text: Its lines.
        language: After the fence.
        line: Of its first line in the page.
        ranks: On how many a block that is marked `<!-- runs: N -->` runs as a script; 0 for one that is
            marked `<!-- runs -->`, which runs after those before it on the page; None without a mark.
        given: Whether it is a part of a script, `<!-- runs with: N -->`, that takes names of a module and its
            data from before it.
    """

    text: str
    language: str
    line: int
    ranks: int | None
    given: bool = False


def pages() -> list[str]:
    """README and all pages, as paths from the root of the repository."""
    found = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
    return ["README.md", *(str(path.relative_to(ROOT)) for path in found)]


def blocks(page: str, language: str) -> list[Block]:
    """The blocks of a page in one language, in order."""
    text = (ROOT / page).read_text()
    found = []
    for match in _BLOCK.finditer(text):
        if match["language"] == language:
            ranks = None if match["runs"] is None else int((match["ranks"] or ": 0")[2:])
            line = text.count("\n", 0, match.start("text")) + 1
            found.append(Block(match["text"], language, line, ranks, match["given"] is not None))
    return found
