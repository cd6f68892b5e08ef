"""What a step makes of the batch alone where it mixes samples: for a micro-batch, its rows of the batch's."""

from lightning_pipeline.model.mixing.calls import Functions as Functions
from lightning_pipeline.model.mixing.calls import Seen as Seen
from lightning_pipeline.model.mixing.derivations import Derivations as Derivations
from lightning_pipeline.model.mixing.derivations import are_alike as are_alike
from lightning_pipeline.model.mixing.differences import Comparison as Comparison
from lightning_pipeline.model.mixing.differences import exchanges as exchanges
from lightning_pipeline.model.mixing.differences import placed_between as placed_between
from lightning_pipeline.model.mixing.differences import with_another as with_another
from lightning_pipeline.model.mixing.looks import Reached as Reached
from lightning_pipeline.model.mixing.meetings import MOVING as MOVING
from lightning_pipeline.model.mixing.picked import Picked as Picked
from lightning_pipeline.model.mixing.rows import Beside as Beside
from lightning_pipeline.model.mixing.rows import Followed as Followed
from lightning_pipeline.model.mixing.rows import Given as Given
from lightning_pipeline.model.mixing.rows import Rows as Rows
from lightning_pipeline.model.mixing.rows import is_cut_by_rows as is_cut_by_rows
from lightning_pipeline.model.mixing.standing import standing_of as standing_of
from lightning_pipeline.model.mixing.standing import trained_in as trained_in
from lightning_pipeline.model.mixing.sums import sums_of_parts as sums_of_parts
