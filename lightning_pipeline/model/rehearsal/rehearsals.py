"""All that a rank finds out about a batch before, or beside, the micro-batches' own runs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from lightning_pipeline.model.cut import Microbatch, Partition
from lightning_pipeline.model.places import Findings, Owner
from lightning_pipeline.model.random import MicrobatchSeeds
from lightning_pipeline.model.rehearsal.as_one import ToldAsOne
from lightning_pipeline.model.rehearsal.divisors import Divisors
from lightning_pipeline.model.rehearsal.dry_runs import DryRuns
from lightning_pipeline.model.rehearsal.made_up_runs import MadeUpRuns
from lightning_pipeline.model.rehearsal.mixed_samples import MixedSamples
from lightning_pipeline.model.rehearsal.mixed_values import MixedValues
from lightning_pipeline.model.rehearsal.routes import RouteFinder
from lightning_pipeline.model.rehearsal.row_order import RowOrder
from lightning_pipeline.model.rehearsal.unit_buffers import UnitBuffers
from lightning_pipeline.model.rehearsal.unit_mixing import UnitMixing
from lightning_pipeline.model.replay import StageView, Told
from lightning_pipeline.model.state import Apart
from lightning_pipeline.model.trace import Call, Trace, UnitPatches


class Rehearsals:
    """Runs of steps without units, or on values that units gave before.

    Args:
        root: The LightningModule.
        cut: Its partition.
        needed: The stages that have each parameter and buffer, by name.
        patches: The patched units.
        told: What steps tell.
        outside: Keeps what a run of a step leaves behind.
        first: The first stage of this rank, with which steps are run to see which units they call.
        last: The last one, with which they are run for what they divide by.
        traced: Traces a step.
        traced_like: Gives a trace with arguments of this form, which may be an earlier one.
        apart: Inside, runs of a step leave nothing behind and tell nobody anything.
        in_silence: Inside, a run of a step tells nobody anything.
        quiet: Inside, runs on made-up values log nothing, and keep random states.
        forget: Told of a step that leaves more behind than its trace shows.
        begun: Inside, given the number of a micro-batch or None, what was left by rows is cut for it.
        others: What a step may change beside the module.
        findings: What is found once for the runs with which a batch begins.
        stage_of: The stage of each unit, of those too that come later.
        stages: Those of this rank.

    Attributes:
        ways: Finds which units each micro-batch calls.
        mixed: Gives micro-batches their part of what a step mixes.
        divisors: Follows what one device divides by.
        as_one: Looks at some batches as one.
        values: Tries whether samples of values of units are mixed.
        buffers: Finds buffers that units advance whatever they are given.
        mixing_units: Finds units that mix samples.
        row_order: Finds in which order rows of joined views stand.
    """

    def __init__(
        self, root: nn.Module, cut: Partition, needed: Mapping[str, Sequence[int]], patches: UnitPatches,
        told: Told, outside: Apart, *,
        first: StageView,
        last: StageView,
        traced: Callable[[str, Microbatch, MicrobatchSeeds | None, Sequence[Call]], Trace],
        traced_like: Callable[..., Trace],
        apart: Callable[[str], AbstractContextManager[None]],
        in_silence: Callable[[], AbstractContextManager[None]],
        quiet: Callable[..., AbstractContextManager[None]],
        forget: Callable[[str], None],
        begun: Callable[..., AbstractContextManager[Any]],
        others: Callable[[], Sequence[Owner]],
        findings: Findings,
        stage_of: Sequence[int],
        stages: Collection[int],
    ) -> None:  # fmt: skip
        begins, ends = DryRuns(first, patches), DryRuns(last, patches)
        self.ways = RouteFinder(
            root, cut, needed, walk=begins.walk, traced=traced, traced_like=traced_like, apart=apart,
            in_silence=in_silence, forget=forget, others=others, findings=findings,
        )  # fmt: skip
        self.mixed = MixedSamples(root, begins.rehearse, self.ways, apart, begun)
        self.divisors = Divisors(
            root, ends.rehearse, patches, self.ways, outside, in_silence, told.whole_noted, apart, quiet
        )
        self.as_one = ToldAsOne(root, told, patches, apart, quiet, self.ways.torn)
        runs = MadeUpRuns(root, patches, apart, quiet)
        self.values = MixedValues(runs, self.ways.outputs, stage_of, stages)
        self.buffers = UnitBuffers(runs, stage_of, stages)
        self.row_order = RowOrder(runs)
        self.mixing_units = UnitMixing(runs, stage_of, stages)
