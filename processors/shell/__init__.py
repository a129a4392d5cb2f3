"""The shell around the stages: the only code of the processors that knows Kafka.

Read in this order: `ledger` (when may an offset be committed), `partition` (one partition number with its stages),
`transport` (batches out of Faust, offsets into it), `app` (the Faust app), `run` (the process).
"""
