"""The trainer's side: whole groups of samples from Kafka, in a form that any training loop takes.

`reader` reads and records, `groups` is the pure part under it, `collate` makes torch tensors. Importing this package loads
neither Faust nor torch.
"""

from rollstream.trainers.base import SampleGroup, SampleSource
from rollstream.trainers.reader import SampleReader

__all__ = ["SampleGroup", "SampleReader", "SampleSource"]
