"""Everything that a run replaces of Lightning, of torch or of the user's objects, and puts back."""

from lightning_pipeline.patching.ledger import Undo, all_undone, patch, patched, standing

__all__ = ["Undo", "all_undone", "patch", "patched", "standing"]
