"""What did happen."""

from lightning_pipeline.recording.timeline import Timeline
from lightning_pipeline.schedules import Action
from tests.calls import calls_of

ACTIONS = [Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1)]


def record(timeline: Timeline, count: int) -> None:
    timeline.begin(ACTIONS)
    for position in range(count):
        timeline.ask(position)
        timeline.start()
        timeline.end()


def test_events_have_ordered_times_and_add_up() -> None:
    timeline = Timeline()
    record(timeline, 3)
    timeline.finish()
    events = list(timeline)
    assert [event.action for event in events] == ACTIONS
    times = [t for event in events for t in event[1:]]
    assert timeline.began <= times[0] <= times[-1] <= timeline.finished
    assert times == sorted(times)
    assert 0 <= timeline.busy_seconds + timeline.waiting_seconds <= (timeline.finished - timeline.began) / 1e9


def test_a_run_forgets_the_one_before() -> None:
    timeline = Timeline()
    record(timeline, 3)
    timeline.begin(ACTIONS[:1])
    assert list(timeline) == []
    assert timeline.current is None


def test_the_last_actions_as_text_end_with_the_current_one() -> None:
    timeline = Timeline()
    record(timeline, 2)
    timeline.ask(2)
    assert [line.split(":")[0] for line in timeline.recent(2)] == ["0B0", "0F1"]
    assert "0F1: waiting since" in timeline.recent()[-1]
    timeline.start()
    assert "0F1: working since" in timeline.recent()[-1]
    assert timeline.current == ACTIONS[2]


def test_an_action_costs_two_calls_a_moment() -> None:
    timeline = Timeline()
    once = calls_of(lambda: record(timeline, 0))
    assert calls_of(lambda: record(timeline, 3)) - once == 3 * 3 * 2, "each asks the clock"


def test_a_recording_that_is_kept_stays_as_it_is() -> None:
    timeline = Timeline()
    record(timeline, 3)
    timeline.finish()
    kept = timeline.last
    events = list(kept)
    record(timeline, 1)
    assert list(kept) == events
    assert (kept.number, timeline.last.number) == (0, 1)
    assert list(kept) == events, "reading does not use it up"
