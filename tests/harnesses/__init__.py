"""Harnesses from npm play scripted tasks through the gateway; `make test-harnesses` runs these, `make test` does not.

They are 700 MB and are not ours: what a new version of one does is no fault of a change here.
"""
