"""What a step leaves in the globals of its file, and what Python itself does."""

import pytest
from lightning.pytorch import LightningModule

from lightning_pipeline.hooks.beside import owners_in_code
from lightning_pipeline.model.places import Surroundings
from lightning_pipeline.model.tensors import code_of


class Step(LightningModule):
    pass


@pytest.mark.parametrize(
    ("name", "seen"), [("counted", ["global " + __name__ + ".counted"]), ("__warningregistry__", [])]
)
def test_a_global_that_a_step_makes_is_seen_and_what_python_warned_of_is_not(name, seen, monkeypatch):
    monkeypatch.delitem(globals(), name, raising=False)
    module = Step()
    around = Surroundings(module, owners_in_code(code_of(module)))
    around.look()
    monkeypatch.setitem(globals(), name, {})
    assert [place.label for place in around.look()] == seen
