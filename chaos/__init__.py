"""`make chaos`: the whole line under faults, against a ledger of truth. Read `run.py` first.

`schedule.py` says when what breaks (pure, from a seed), `cluster.py` starts everything, `faults.py` breaks it, `positions.py`
sees when it works again. `load.py` plays agents and writes down what it was told; `compare.py` looks for it in what is stored.
"""
