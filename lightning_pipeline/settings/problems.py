"""What is wrong with a configuration, in words."""

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.schedules import Schedule
from lightning_pipeline.settings.choices import FORWARDS_FIRST


class Problems(list[str]):
    """What is wrong with a configuration, collected so that the user reads all of it in one go."""

    def refuse(self, what: str) -> None:
        """Raise if there is any.

        Raises:
            ConfigurationError: With every problem found, one a line when there are several.
        """
        if len(self) == 1:
            raise ConfigurationError(f"{what}: {self[0]}")
        if self:
            raise ConfigurationError("\n  - ".join([f"{what}: {len(self)} problems", *self]))


def refusal_of_early_backwards(schedule: Schedule) -> str:
    """Why a schedule cannot serve a loss of the whole batch, and which can."""
    return (
        f"loss_over_batch=True needs a schedule whose last stage finishes all forwards before its first "
        f"backward, and {schedule!r} does not: use schedule={' or '.join(map(repr, FORWARDS_FIRST))}"
    )
