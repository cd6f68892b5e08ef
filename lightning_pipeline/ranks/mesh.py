"""How the devices of a Trainer are shared out over stages and replicas."""

from lightning_pipeline.errors import ScheduleError
from lightning_pipeline.ranks.groups import Numbering
from lightning_pipeline.schedules import ForwardOnly, Plan
from lightning_pipeline.settings import Problems, Settings


def fit_to_devices(
    settings: Settings, devices: int, num_nodes: int, device_type: str
) -> tuple[Plan, Numbering]:
    """Share the devices out.

    Args:
        settings: Checked arguments of the strategy.
        devices: Devices per node.
        num_nodes: Nodes.
        device_type: `"cpu"`, `"cuda"`, ...; for the advice in an error.

    Returns:
        A plan with the placement of the stages, and the numbers of the ranks.

    Raises:
        ConfigurationError: `devices * num_nodes` is not `stages * data_parallel_size`, or the schedule
            does not serve this number of ranks.
    """
    world, problems = devices * num_nodes, Problems()
    stages, replicas = _sizes(settings, world)
    if stages * replicas != world:
        problems.append(_misfit(settings, devices, num_nodes, device_type))
    try:
        placement: Plan | None = ForwardOnly(like=settings.schedule).plan(stages, 1)
    except ScheduleError as error:
        placement = None
        problems.append(str(error))
    problems.refuse("PipelineStrategy does not fit the Trainer")
    assert placement is not None, "a problem was raised"
    return placement, Numbering.of(placement, replicas=replicas)


def _sizes(settings: Settings, world: int) -> tuple[int, int]:
    asked_replicas = settings.data_parallel_size
    if settings.stages == "auto":
        replicas = 1 if asked_replicas == "auto" else asked_replicas
        return max(1, world // replicas), replicas
    stages = settings.stages
    return stages, max(1, world // stages) if asked_replicas == "auto" else asked_replicas


def _misfit(settings: Settings, devices: int, num_nodes: int, device_type: str) -> str:
    stages, replicas = _sizes(settings, devices * num_nodes)
    per_node, rest = divmod(stages * replicas, num_nodes)
    mend = f"use Trainer(devices={per_node})" if not rest else f"use a multiple of {num_nodes} ranks"
    found = "; devices='auto' on CPU is 1" if device_type == "cpu" and devices == 1 else ""
    return (
        f"devices={devices} * num_nodes={num_nodes} is {devices * num_nodes}, but stages={stages} * "
        f"data_parallel_size={replicas} is {stages * replicas}{found}: {mend}, or other stages"
    )
