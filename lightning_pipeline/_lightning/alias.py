"""`lightning.pytorch` and `pytorch_lightning` are two packages of one code: the first under both names."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["alias_pytorch_lightning", "is_pytorch_lightning_apart"]

_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def alias_pytorch_lightning() -> None:
    """Have `import pytorch_lightning` give `lightning.pytorch` from now on, in all code of this process.

    The two packages have the same code, but each has classes of its own: a Trainer of one takes no strategy,
    module or callback of the other. Call this at the top of a script whose code, or whose libraries' code,
    imports pytorch_lightning; further calls do nothing. `lightning_fabric` is `lightning.fabric` then.

    Raises:
        ImportError: One of these packages has been imported already.
    """
    if any(isinstance(finder, _Alias) for finder in sys.meta_path):
        return
    imported = [name for name in _NAMES if name in sys.modules]
    if imported:
        raise ImportError(
            f"{imported[0]} has been imported already, and its classes may be in use: call "
            "lightning_pipeline.alias_pytorch_lightning() before anything imports it"
        )
    sys.meta_path.insert(0, _Alias())


def is_pytorch_lightning_apart() -> bool:
    """Whether both packages are in use, so that there are two classes of each name."""
    other = sys.modules.get("pytorch_lightning")
    return other is not None and other is not sys.modules.get("lightning.pytorch")


class _Alias(MetaPathFinder, Loader):
    """Finds a module of the one name by the other; both names then mean the same module."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = _other_name(fullname)
        if name is None or importlib.util.find_spec(name) is None:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        name = _other_name(spec.name)
        assert name is not None, "only such modules are found"
        module = importlib.import_module(name)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run; the import has given it a specification of the other name."""
        assert module.__spec__ is not None, "a module that is imported has a spec"
        module.__spec__ = self._specs.pop(module.__spec__.name)


def _other_name(fullname: str) -> str | None:
    package, dot, rest = fullname.partition(".")
    return f"{_NAMES[package]}{dot}{rest}" if package in _NAMES else None
