"""Pipeline parallelism for the LightningModule you already have."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_pipeline._lightning import alias_pytorch_lightning
    from lightning_pipeline.checkpoint import load_from_checkpoint
    from lightning_pipeline.strategy import PipelineStrategy

__all__ = ["PipelineStrategy", "alias_pytorch_lightning", "load_from_checkpoint"]

_LIGHTNING = "lightning.pytorch"
_LIGHT = ("lightning_pipeline.schedules", "lightning_pipeline.errors")  # rooms that import no Lightning


def __getattr__(name: str) -> Any:
    # Late, so that `import lightning_pipeline.schedules` stays free of torch.
    if name == "PipelineStrategy":
        return _make_known().PipelineStrategy
    if name == "alias_pytorch_lightning":
        _make_known()
        return importlib.import_module("lightning_pipeline._lightning").alias_pytorch_lightning
    if name == "load_from_checkpoint":
        _make_known()
        return importlib.import_module("lightning_pipeline.checkpoint").load_from_checkpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _make_known() -> ModuleType:
    """Import the strategy, which puts `strategy="pipeline"` into Lightning's registry."""
    return importlib.import_module("lightning_pipeline.strategy")


class _AfterLightning(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the strategy known as soon as Lightning has been imported, where that comes later."""

    _loader: importlib.abc.Loader

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _LIGHTNING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None, "a module that is imported has a spec"
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if not _a_room_imports():
            _make_known()
        elif "lightning_pipeline.strategy" not in sys.modules:
            from lightning.pytorch.strategies import StrategyRegistry

            def late(**options: Any) -> Any:
                return __getattr__("PipelineStrategy")(**options)

            StrategyRegistry.register("pipeline", late, stages="auto")


def _a_room_imports() -> bool:
    """Whether Lightning is imported from inside of this package, whose strategy would find half of a room."""
    return any(name.startswith(f"{__name__}.") and not name.startswith(_LIGHT) for name in sys.modules)


if hasattr(sys.modules.get(_LIGHTNING), "Trainer"):
    _make_known()
else:
    sys.meta_path.insert(0, _AfterLightning())
