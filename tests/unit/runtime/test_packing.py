"""One buffer for the tensors of a message, and its header."""

import pytest
import torch
from torch import Tensor

from lightning_pipeline.errors import MessageError
from lightning_pipeline.wire.agreement import Agreement, Agreements
from lightning_pipeline.wire.header import Header, header_bytes, read_header, read_missing, write_header
from lightning_pipeline.wire.packing import ALIGNMENT, Layout, Parcel, specs_of
from lightning_pipeline.wire.stage import Values

CASES = {
    "contiguous": torch.randn(3, 4),
    "0-dim": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.zeros(0, 3),
    "bool": torch.tensor([True, False, True]),
    "bfloat16": torch.randn(5).bfloat16(),
    "complex": torch.randn(2, 2, dtype=torch.complex64),
    "conjugate": torch.randn(2, 2, dtype=torch.complex64).conj(),
    "transposed": torch.randn(3, 4).t(),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "sliced": torch.randn(6, 8)[1::2, :5],
    "expanded": torch.randn(3, 1).expand(3, 4),
    "needs gradient": torch.randn(3, requires_grad=True),
}


@pytest.mark.parametrize("tensor", CASES.values(), ids=CASES.keys())
def test_a_tensor_comes_out_as_it_went_in(tensor: Tensor) -> None:
    layout = Layout(specs_of([torch.ones(1), tensor]), start=header_bytes(0))
    parcel = Parcel(layout, pinned=False)
    parcel.fill([torch.ones(1), tensor])
    seen = layout.view(parcel.buffer.clone())[1]
    assert torch.equal(seen, tensor)
    assert seen.dtype == tensor.dtype
    assert seen.stride() == torch.empty_like(tensor).stride()
    assert seen.data_ptr() % ALIGNMENT == 0 or not tensor.numel()


def test_a_sparse_value_cannot_cross_a_cut() -> None:
    with pytest.raises(MessageError, match="layout torch.sparse_coo cannot cross a cut"):
        specs_of([torch.eye(2).to_sparse()])


@pytest.mark.parametrize("count", [0, 1, 7, 192, 193, 1000])
def test_a_header_with_any_number_of_flags_comes_out_as_it_went_in(count: int) -> None:
    header = Header(1, 2, 3, 4, 5, 6, 7, 2**32 - 1, count, 2**40, copied=count)
    missing = [index % 3 == 0 for index in range(count)]
    buffer = torch.empty(header_bytes(count), dtype=torch.uint8)
    write_header(buffer, header, missing)
    assert read_header(buffer) == header
    assert read_missing(buffer, count) == missing
    assert buffer.numel() % ALIGNMENT == 0


def test_an_agreement_covers_only_values_that_are_the_same_in_everything() -> None:
    table = ("spec", 1)
    agreed = Agreement.of(Values([torch.zeros(2, 3)], table))
    assert agreed.covers(Values([torch.ones(2, 3)], table))
    assert agreed.covers(Values([torch.ones(2, 3)], ("spec", int("1"))))
    others = [
        torch.zeros(3, 2),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 3).half(),
        torch.zeros(2, 3).requires_grad_(),
    ]
    assert not any(agreed.covers(Values([other], table)) for other in others)
    assert not agreed.covers(Values([torch.zeros(2, 3)], ("spec", 2)))
    assert not agreed.covers(Values([], table))


def test_agreements_enter_after_the_run_and_the_oldest_leave() -> None:
    agreements = Agreements()
    agreement = Agreement.of(Values([]))
    for run in range(1030):
        agreements.begin([run])
        agreements.note(1, 0, agreement)
        assert agreements.get(1, 0) is None
        agreements.commit()
    agreements.begin(range(1030))
    assert agreements.get(1, 5) is None
    assert agreements.get(1, 6) is agreement


def test_buffers_are_used_again() -> None:
    layout = Layout(specs_of([torch.zeros(4)]), start=64)
    with torch.inference_mode():
        first = Parcel.of(layout, pinned=False)
        first.fill([torch.ones(4)])
    first.release()
    second = Parcel.of(layout, pinned=False)
    second.fill([torch.zeros(4, requires_grad=True)])
    assert second is first
