"""Every block of Python and of a shell in README and docs runs, or says why it cannot run here."""

import contextlib
import importlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import tensor

from lightning_pipeline.__main__ import main as lightning_pipeline_command
from tests.pages import ROOT, Block, blocks, pages
from tests.pool import Pool
from tests.ranks.pages_need import NAMES, make_files, names

pytestmark = pytest.mark.timeout(400)  # a page has several runs, and a machine may have much other work
Ranks = Callable[[int], Pool]
LANGUAGES = ("python", "bash")
LONG = 240.0  # seconds, on a machine with much other work: ranks import transformers
SCRIPTS = {
    block.text: block.ranks
    for page in pages()
    for block in blocks(page, "python")
    if block.ranks and not block.how
}


def pages_with(how: str) -> list[str]:
    return [page for page in pages() if any(block.how == how for block in blocks(page, "python"))]


def walked(page: str) -> list[Block]:
    """The blocks of a page that run one after the other."""
    return [
        block
        for block in blocks(page, *LANGUAGES)
        if not block.how and (block.ranks == 0 or (block.language == "bash" and block.ranks))
    ]


WALKED = [page for page in pages() if walked(page)]
SMALLER = {
    "train_gpt.py": ["--steps", "2", "--layers", "2", "--width", "16", "--batch_size", "8"],
    "finetune_transformers.py": ["--steps", "2"],
    "gpt_cli.py": [
        "--trainer.max_steps=4", "--trainer.val_check_interval=2", "--model.layers=2", "--model.width=32",
    ],
    "gpt.GPT": ["--model.layers", "8", "--model.width", "32", "--model.heads", "4"],
    "vit.ViT": ["--model.width", "32", "--model.blocks", "4", "--model.heads", "4"],
    "models.Llama": ["--batch", "8,16:int64", "--devices", "4"],
    "--sweep": ["--sweep_stages", "[2]", "--sweep_microbatches", "[4]", "--sweep_schedules", "[1F1B]"],
}  # fmt: skip
"""By a word of a command, arguments after its own that make the work small enough for a test."""


def run_script(script: str) -> str:
    """Run a file in this rank as `python FILE` does, and return what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("text", SCRIPTS)
def test_a_script_trains_and_prints_what_its_page_says(ranks: Ranks, tmp_path: Path, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text.replace("max_epochs=2", f"max_epochs=2, default_root_dir={str(tmp_path)!r}"))
    first, *_ = ranks(SCRIPTS[text] or 1)(run_script, str(script), group=False, timeout=LONG)
    (loss,) = [line for line in first.splitlines() if line.startswith("loss ")]
    told = [
        page for page in pages() if text in (ROOT / page).read_text() and loss in (ROOT / page).read_text()
    ]
    assert told, f"it printed {loss!r}"


def once(text: str) -> str:
    """A block whose Trainer goes over the data once, where it does not say how often."""
    return re.sub(r"(devices=\d,)", r"\1 max_epochs=1,", text) if "max_epochs" not in text else text


def run_part(text: str, folder: str) -> tuple[int, int]:
    """Run a block in this rank with what it takes for granted: steps and epochs of its Trainer."""
    with contextlib.chdir(folder):
        found = names()
        found.pop("trainer")
        exec(compile(text, "page", "exec"), found)
    return found["trainer"].global_step, found["trainer"].current_epoch


@pytest.mark.parametrize("page", pages_with("with"))
def test_the_parts_of_a_page_run_with_the_readers_module(ranks: Ranks, tmp_path: Path, page: str) -> None:
    for block in blocks(page, "python"):
        if block.how == "with":
            text = once(block.text)
            ends = ranks(block.ranks or 1)(run_part, text, str(tmp_path), group=False, timeout=LONG)
            epochs = 2 if "ckpt_path" in text else 1
            assert ends == [(2 * epochs, epochs)] * len(ends)


def run_together(page: str, folder: str) -> list[str]:
    """Run the blocks of a page that belong together in this rank; what they wrote."""
    with contextlib.chdir(folder):
        found = NAMES[page]()
        for block in blocks(page, "python"):
            if block.how == "together":
                exec(compile("\n" * (block.line - 1) + once(block.text), page, "exec"), found)
        return sorted(path.name for path in Path("tuned-gpt2").iterdir())


@pytest.mark.parametrize("page", pages_with("together"))
def test_the_blocks_of_a_page_that_belong_together_run(
    ranks: Ranks, files: Path, tmp_path: Path, page: str
) -> None:
    folder = shutil.copytree(files, tmp_path / "here")
    written, *_ = ranks(2)(run_together, page, str(folder), group=False, timeout=LONG)
    assert "model.safetensors.index.json" in written or "model.safetensors" in written


@pytest.fixture(scope="module")
def files(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what pages take for granted; copied, not changed."""
    folder = tmp_path_factory.mktemp("files")
    make_files(folder, ranks)
    return folder


_names: dict[str, dict[str, Any]] = {}  # of a page, kept in the rank from block to block


def run_block(page: str, text: str, line: int, folder: str) -> None:
    """Run a block of Python after those before it on its page, in a process that is no rank."""
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC", "MASTER")) or name.endswith(("RANK", "WORLD_SIZE")):
            del os.environ[name]
    with contextlib.chdir(folder):
        if page not in _names:
            _names.clear()
            _names[page] = NAMES.get(page, names)()
        exec(compile("\n" * (line - 1) + text, page, "exec"), _names[page])


def counted_labels(page: str) -> int:
    """What the hook of this page says of labels of which one counts."""
    return int(_names[page]["microbatch_weight"](None, {"labels": tensor([-100, 3])}))


def run_words(words: list[str], folder: str) -> str:
    """Run a command in this rank, as a process of its own would; what it printed."""
    program, *arguments = words
    if program == "python" and arguments[0] == "-m":
        _, program, *arguments = arguments
        start = lambda: runpy.run_module(program, run_name="__main__", alter_sys=True)  # noqa: E731
    elif program == "python":
        program, *arguments = arguments
        start = lambda: runpy.run_path(program, run_name="__main__")  # noqa: E731
    else:
        start = lightning_pipeline_command
    before, path, argv = set(sys.modules), list(sys.path), sys.argv
    printed = io.StringIO()
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
            sys.argv = [program, *arguments]
            sys.path.insert(0, str((Path(folder) / program).parent))
            start()
    except SystemExit as error:
        assert not error.code, f"{' '.join(words)}: {error.code}\n{printed.getvalue()}"
    finally:
        sys.path[:], sys.argv = path, argv
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(Path(folder))):
                del sys.modules[name]
    return printed.getvalue()


def run_command(ranks: Ranks, words: list[str], folder: Path, number: int) -> Path:
    """Run a command of a page on so many ranks; the folder that the next one runs in."""
    if words[0] == "cd":
        return folder / words[1]
    if words[0] == "make":
        made = ["make", "-C", str(ROOT), "-n", "-o", ".venv/ready", "-o", ".venv/tested", *words[1:]]
        done = subprocess.run(made, text=True, capture_output=True, check=True)
        words = [line for line in done.stdout.splitlines() if line.startswith(".venv")][-1].split()
        words[0] = "python"
    if words[1:] == ["-m", "tests.lanes"]:  # we are in it
        return folder
    if words[0] == "torchrun":
        assert words[1:3] == ["--nproc-per-node", str(number)]
        words = ["python", *words[3:]]
    for word, more in SMALLER.items():
        if any(word in given for given in words):
            words = [*words, *more]
    ranks(number)(run_words, words, str(folder), group=False, timeout=LONG)
    return folder


@pytest.mark.parametrize("page", WALKED)
def test_the_blocks_of_a_page_run_one_after_the_other(
    ranks: Ranks, files: Path, tmp_path: Path, page: str
) -> None:
    folder = shutil.copytree(files, tmp_path / "here")
    if "transformers" in page:  # its script begins a process of its own
        ranks(2).close()
    for block in walked(page):
        if block.language == "bash":
            for words in block.commands:
                folder = run_command(ranks, words, folder, block.ranks or 1)
        else:
            ranks(1)(run_block, page, once(block.text), block.line, str(folder), group=False, timeout=LONG)
    if page == "docs/same-numbers.md":
        assert ranks(1)(counted_labels, page, group=False, timeout=LONG) == [1]


def look_in(folder: str) -> None:
    """Find modules in a folder, in this rank."""
    sys.path.insert(0, folder)


def test_the_test_of_the_contributors_page_passes(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = [block for block in blocks("CONTRIBUTING.md", "python") if block.how == "as a test"]
    imports = "import torch\nimport torch.distributed as dist\n\n"
    (tmp_path / "the_contributors_test.py").write_text(imports + block.text)
    monkeypatch.syspath_prepend(tmp_path)
    ranks(2)(look_in, str(tmp_path))
    importlib.import_module("the_contributors_test").test_ranks_sum(ranks)


def test_every_block_runs_or_says_why_it_cannot_run_here() -> None:
    silent = [
        f"{page}:{block.line}"
        for page in pages()
        for block in blocks(page, *LANGUAGES)
        if block.ranks is None and not block.elsewhere and not block.how
    ]
    assert silent == []


def test_the_first_block_of_the_readme_runs() -> None:
    assert blocks("README.md", "python")[0].ranks == 2
