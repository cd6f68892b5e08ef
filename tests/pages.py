"""The code blocks of README.md, CONTRIBUTING.md and docs/, for the tests that read and run them."""

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- (?:(?P<runs>runs)(?P<how> with| together| as a test)?(?:: (?P<ranks>\d))?"
    r"|elsewhere: (?P<elsewhere>[^\n]+?)) -->\n(?P=indent))?"
    r"```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$",
    re.S | re.M,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and how it runs in the tests, which the comment above it says.

    `<!-- runs -->`: after those before it on the page, Python in one process and a shell's commands one after
    the other. `<!-- runs: N -->`: the same commands on N ranks; Python, as a script of N ranks. `<!-- runs
    with: N -->`: a part of a script, after what makes a module and its data. `<!-- runs together: N -->`:
    likewise, but with all such blocks of the page in one run, after a fit. `<!-- elsewhere: why -->`: not here.

    Args:
        text: Its lines, without what all are indented by.
        language: After the fence.
        line: Of its first line in the page.
        ranks: Of the comment, 0 without a number, `None` without a comment.
        how: `with`, `together`, or nothing.
        elsewhere: Why it does not run here.
    """

    text: str
    language: str
    line: int
    ranks: int | None
    how: str = ""
    elsewhere: str = ""

    @property
    def commands(self) -> list[list[str]]:
        """Of a shell's block: its commands by word, without comments and settings of the environment."""
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True) for line in lines]
        found = []
        for command in filter(None, words):
            while re.match(r"^[A-Z_]+=", command[0]):
                command = command[1:]
            found.append(command)
        return found


def pages() -> list[str]:
    """README, CONTRIBUTING and all pages, as paths from the root of the repository."""
    found = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
    return ["README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in found)]


def blocks(page: str, *languages: str) -> list[Block]:
    """The blocks of a page in some languages, in order."""
    text = (ROOT / page).read_text()
    found = []
    for match in _BLOCK.finditer(text):
        if match["language"] in languages:
            line = text.count("\n", 0, match.start("text")) + 1
            ranks = None if match["runs"] is None else int(match["ranks"] or 0)
            how, elsewhere = (match["how"] or "").strip(), match["elsewhere"] or ""
            text_here = textwrap.dedent(match["text"])
            found.append(Block(text_here, match["language"], line, ranks, how, elsewhere))
    return found
