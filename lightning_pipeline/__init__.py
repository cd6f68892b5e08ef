"""Pipeline parallelism for the LightningModule you already have."""
