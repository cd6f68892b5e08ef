"""Messages are written down at both ends while somebody records, and only then."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from lightning_pipeline.executor.executor import Executor
from lightning_pipeline.ranks.groups import Groups
from lightning_pipeline.recording.timeline import Message
from lightning_pipeline.schedules import Action, communicate, get_schedule
from tests.pool import Pool
from tests.ranks.toy import Toy

Ranks = Callable[[int], Pool]


def run_recorded(schedule: str) -> Any:
    """The messages of the first and of the third run, and those of a run that was not recorded."""
    plan = get_schedule(schedule).plan(2, 4)
    groups = Groups(plan)
    stages = {s: Toy(s, plan.num_stages, 4) for s in plan.stages_of(groups.rank)}
    executor, found = Executor(stages, groups), []
    for recorded in (True, True, True, False):
        if recorded is not (executor.log is not None):
            executor.record_messages(recorded)
        executor.run(plan, ["train"] * 4)
        found.append(list(executor.log.messages) if executor.log is not None else [])
    links = [(channel.link.bytes_sent, channel.link.bytes_received) for channel in executor.channels.values()]
    groups.close()
    return groups.rank, found, links


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBH1"])
def test_every_message_of_a_run_is_written_down_at_both_ends(ranks: Ranks, schedule: str) -> None:
    planned = communicate(get_schedule(schedule).plan(2, 4))
    expected = [sorted(a for a in actions if "_" in a.kind) for actions in planned]
    (_, first, (link,)), (_, second, _) = sorted(ranks(2)(run_recorded, schedule))
    for run in range(3):
        both: list[list[Message]] = [first[run], second[run]]
        assert [sorted(message.action for message in messages) for messages in both] == expected
        by_action = {message.action: message for messages in both for message in messages}
        for stage, kind, microbatch in by_action:
            if kind.startswith("SEND"):
                letter = kind[-1]
                neighbour = stage + (1 if letter == "F" else -1)
                sent = by_action[Action(stage, kind, microbatch)]
                received = by_action[Action(neighbour, f"RECV_{letter}", microbatch)]
                assert sent.num_bytes == received.num_bytes > 64
                assert sent.began < received.ended and sent.began < sent.ended
        for rank, messages in enumerate(both):
            assert {message.peer for message in messages} == {1 - rank}
            assert all(before.ended <= after.began for before, after in itertools.pairwise(messages))
    assert first[3] == second[3] == []
    # The first run also says what later ones agree on; the openings of the runs are counted by the link alone.
    counted = sum(m.num_bytes for run in first[:3] for m in run if m.action.kind.startswith("SEND"))
    last = sum(m.num_bytes for m in first[2] if m.action.kind.startswith("SEND"))
    assert link[0] == counted + last + 4 * 64
