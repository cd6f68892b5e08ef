import subprocess
import sys

import pytest

from lightning_pipeline.errors import ScheduleError
from lightning_pipeline.schedules import Action, GPipe, OneFOneB, Plan


def test_an_action_prints_and_parses() -> None:
    assert str(Action(12, "I", 34)) == "12I34"
    assert Action.parse(" 3SEND_F1 ") == Action(3, "SEND_F", 1)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0x", "-1F0", "2 F 0"])
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action: write stage, kind"):
        Action.parse(text)


def test_a_plan_is_a_sequence_of_ranks() -> None:
    plan = OneFOneB().plan(3, 4)
    assert (plan.num_ranks, plan.num_stages, plan.num_microbatches, len(plan)) == (3, 3, 4, 3)
    assert plan[2][:2] == (Action(2, "F", 0), Action(2, "B", 0))
    assert [actions[0].stage for actions in plan] == [0, 1, 2]
    assert repr(plan) == "<Plan of 3 stages on 3 ranks for 4 micro-batches>"


def test_a_plan_knows_where_its_stages_are() -> None:
    plan = Plan.parse("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0")
    assert [plan.rank_of(stage) for stage in range(4)] == [0, 1, 1, 0]
    assert plan.stages_of(0) == (0, 3)
    with pytest.raises(ScheduleError, match="holds stage 4; it has stages 0, 1, 2, 3"):
        plan.rank_of(4)


def test_plans_compare_by_their_actions() -> None:
    assert OneFOneB().plan(2, 3) == OneFOneB().plan(2, 3)
    assert hash(OneFOneB().plan(2, 3)) == hash(OneFOneB().plan(2, 3))
    assert OneFOneB().plan(2, 3) != GPipe().plan(2, 3)
    assert OneFOneB().plan(2, 3) != "1F1B"


def test_a_plan_parses_what_it_printed_pairs_too() -> None:
    plan = Plan.parse("0F0 1F0 (0F1;1B0)OVERLAP_F_B 0B0\n")
    assert plan.pairs_of(0) == {2}
    assert str(plan) == "0F0 1F0 (0F1;1B0)OVERLAP_F_B 0B0"
    assert Plan.parse(str(plan)) == plan


def test_a_parse_error_names_rank_and_position() -> None:
    with pytest.raises(ScheduleError, match="rank 1, position 2: '1Q0' is not an action"):
        Plan.parse("0F0\n1F0 1B0 1Q0")


def test_csv_goes_out_and_comes_back(tmp_path) -> None:
    plan = Plan.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1\n1F0 1B0 1F1 1B1")
    plan.to_csv(tmp_path / "plan.csv")
    assert Plan.from_csv(tmp_path / "plan.csv") == plan


def test_csv_drops_idle_slots_and_what_torch_does_to_parameters(tmp_path) -> None:
    (tmp_path / "plan.csv").write_text("0UNSHARD,0F0,,,0B0,0REDUCE_GRAD,0RESHARD\r\n,1F0,1B0,\r\n")
    assert Plan.from_csv(tmp_path / "plan.csv") == GPipe().plan(2, 1)


def test_csv_with_messages_is_refused(tmp_path) -> None:
    (tmp_path / "plan.csv").write_text("0F0,0SEND_F0\n1RECV_F0,1F0\n")
    with pytest.raises(ScheduleError, match="format='compute_only'"):
        Plan.from_csv(tmp_path / "plan.csv")


def test_schedules_import_no_torch() -> None:
    code = "import sys, lightning_pipeline.schedules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_smaller_batch_keeps_the_plan_without_the_surplus() -> None:
    plan = Plan.parse("0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2")
    assert str(plan.first(2)) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    assert plan.first(3) == plan
    with pytest.raises(ScheduleError, match="serves 1 to 3 micro-batches, not 4"):
        plan.first(4)
