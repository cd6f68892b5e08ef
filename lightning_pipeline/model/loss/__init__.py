"""What a loss of a micro-batch is worth in the batch."""

from lightning_pipeline.model.loss.bent import Bent as Bent
from lightning_pipeline.model.loss.bent import DifferentWaysError as DifferentWaysError
from lightning_pipeline.model.loss.bent import together as together
from lightning_pipeline.model.loss.events import Guess as Guess
from lightning_pipeline.model.loss.events import Whole as Whole
from lightning_pipeline.model.loss.follower import Follower as Follower
from lightning_pipeline.model.loss.follower import Part as Part
from lightning_pipeline.model.loss.follower import check_no_class_weights as check_no_class_weights
from lightning_pipeline.model.loss.follower import seeds_of as seeds_of
from lightning_pipeline.model.loss.metric_answers import stub_metrics as stub_metrics
from lightning_pipeline.model.loss.metric_calls import MetricCalls as MetricCalls
from lightning_pipeline.model.loss.observer import Observer as Observer
from lightning_pipeline.model.loss.observer import rehearsed as rehearsed
from lightning_pipeline.model.loss.observer import told_apart as told_apart
from lightning_pipeline.model.loss.recipes import Recipes as Recipes
from lightning_pipeline.model.loss.weighting import Weights as Weights
from lightning_pipeline.model.loss.weighting import loss_of_batch as loss_of_batch
from lightning_pipeline.model.loss.weighting import weights_of as weights_of
