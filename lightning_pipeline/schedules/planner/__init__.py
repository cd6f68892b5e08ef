"""The search behind `Auto`: orders of forwards and backwards, and weight gradients put into their gaps."""
