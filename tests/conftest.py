"""Fixtures for all tests: pools of ranks, one per world size, kept for the session."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Before torch is imported, and for the fork server that starts the ranks.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = str(Path(__file__).resolve().parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))

import pytest  # noqa: E402
import torch  # noqa: E402

from tests import lanes, whole  # noqa: E402
from tests.pool import Pool  # noqa: E402

torch.set_num_threads(1)

collect_ignore = ["ranks/unguarded.py"]  # trains when it is imported, as the search for doctests does


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the rows that `make test` leaves out, before `-m` looks at marks."""
    whole.mark(items, only_some=any("::" in argument for argument in config.args))
    lanes.check_quiet(items)
    items[:] = whole.in_turn(items)


def pytest_runtest_setup() -> None:
    """Leave out what comes when the time is over that CI has."""
    whole.leave_out_late()


def pytest_collection_finish() -> None:
    """Keep what is imported out of garbage collections: a trace makes one, 0.3 s each without this."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _keep_late_imports_out_of_collections() -> Iterator[None]:
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leave_the_environment_alone() -> Iterator[None]:
    """Put the environment back: a run in this process leaves its port behind, which a later script would take.

    A fixture of a module may have made such a run before the first test that asks for it.
    """
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    before = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    yield
    for name in [name for name in os.environ if name not in before and not name.startswith("PYTEST_")]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """Pools by size: `run = ranks(2)`, then `run(function, *args)` gives what each rank returned."""
    pools: dict[int, Pool] = {}

    def pool_of(size: int) -> Pool:
        if size not in pools:
            pools[size] = Pool(size)
        return pools[size]

    yield pool_of
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def apart() -> Iterator[Callable[[int], Pool]]:
    """Pools that know the device of `tests/island.py`: a process that has heard of it keeps it."""
    from tests import island

    pools: dict[int, Pool] = {}

    def pool_of(size: int) -> Pool:
        if size not in pools:
            pools[size] = Pool(size)
        pools[size](island.register)  # anew after a failure: before the first backward, which counts devices
        return pools[size]

    yield pool_of
    for pool in pools.values():
        pool.close()
