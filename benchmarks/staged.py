"""Build modules in parts, and compare with one device; or measure the memory of ranks that do so.

    python benchmarks/staged.py architectures
    python benchmarks/staged.py training
    python benchmarks/staged.py memory --layers 16 --width 5000 --stages 4

`architectures`: for each module of `tests/unit/construction/built.py`, on 2 and 4 stages, in two data types:
whether own weights and generators equal one device's. `training`: whether three steps do. `memory`: how far a
rank's anonymous memory rises over what it was before, for construction, `save_weights`, `load_weights`, a
checkpoint, and its resume.
"""

import sys
import tempfile
import warnings
from pathlib import Path

import torch
from jsonargparse import auto_cli

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.pool import Pool
from tests.ranks.staged_memory import measure, table
from tests.ranks.staged_training import USES, train
from tests.ranks.staged_training import differences as trained_otherwise
from tests.unit.construction.built import TORCH, Make, hugging_face
from tests.unit.construction.test_construction import parts


def differences(make: Make, stages: int) -> str:
    """What is not as on one device; empty where nothing is.

    Args:
        make: Builds the module.
        stages: That it is shared out to.
    """
    made, whole, states = parts(make, stages)
    wrong = [name for found in made for name, tensor in found.items() if not torch.equal(tensor, whole[name])]
    drawn = any(not torch.equal(states[0], state) for state in states[1:])
    lost = whole.keys() - {name for found in made for name in found}
    return ", ".join([*wrong[:3], *sorted(lost)[:3], *(["generator"] if drawn else [])])


def architectures() -> None:
    """Compare all of them, and print a line for each."""
    torch.set_num_threads(1)
    failed = 0
    for name, make in {**TORCH, **hugging_face()}.items():
        for dtype in (torch.float32, torch.bfloat16):
            torch.set_default_dtype(dtype)
            for stages in (2, 4):
                try:
                    told = differences(make, stages)
                except (RuntimeError, NotImplementedError) as error:  # such as no `qr` of bfloat16
                    told = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                failed += bool(told)
                print(f"{name:14} {dtype!s:15} {stages} stages: {told or 'equal'}", flush=True)
    torch.set_default_dtype(torch.float32)
    print(f"{failed} not equal")
    sys.exit(failed > 0)


def training(stages: int = 2, only: str = "") -> None:
    """Train each for three steps over stages and on one device, and print a line for each.

    Args:
        stages: Ranks.
        only: The name of one module. Default: all.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    failed, pool = 0, Pool(stages)
    for name in [only] if only else [*USES, *hugging_face()]:
        expected, _ = train(name, None)
        outcomes = pool.outcomes(train, name, {"stages": stages, "num_microbatches": 1}, timeout=120)
        errors = [str(one.error or one.report) for one in outcomes if not one.ok]
        told = errors[0] if errors else trained_otherwise(expected, [one.value for one in outcomes])
        failed += bool(told)
        print(f"{name:14} {stages} stages: {told or 'equal'}", flush=True)
    pool.close()
    print(f"{failed} not equal")
    sys.exit(failed > 0)


def memory(layers: int = 16, width: int = 5000, stages: int = 4) -> None:
    """Measure the phases of a run, and print a line for each, in MiB by rank.

    Args:
        layers: Square ones of float32.
        width: Of each.
        stages: Ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = Pool(stages)(measure, folder, stages, layers, width, timeout=600, group=False)
    print(f"a model of {layers * width * width * 4 / 2**20:,.0f} MiB on {stages} stages")
    print(table(found))


if __name__ == "__main__":
    auto_cli([architectures, training, memory], as_positional=False)
