"""Copies of every topic in stores that people query: ClickHouse tables, Parquet files, memory. And what proves them.

Read in this order: `base` (what a sink is), `chunks` (which offsets go together), `tables` (which rows a record becomes),
`clickhouse`, `objects`, then `run` (the loop). `audit` and `explain` answer over the stored rows.

Adding a sink: one file with a class that fits `base.Sink`, one line in `run.open_sink`.
"""
