"""A notebook's cells, without a guard: processes are forked from one that has imported everything."""

from tests.ranks.launched_once import train

train("fork")
