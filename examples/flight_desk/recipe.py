"""The numbers of the demo's learning recipe, each with its reason.

Measured in one process, with samples one or two versions old as in the stream; a call is one tool call of the model.
"""

from __future__ import annotations

from typing import Final

TEACH_STEPS: Final = 450
"""Supervised steps: 17 s on one free core. With 300, one call in nine is malformed and some seeds have not yet learned to
look at the answer of the desk, which costs reinforcement more than it saves."""

GROUP_SIZE: Final = 8
"""Rollouts of the same desk."""

GROUPS_PER_STEP: Final = 8
"""About 290 calls a step. Many small steps need fewer calls than few large ones."""

STEPS: Final = 68
"""About 20,000 calls; 0.8 is reached after 20 to 35 steps."""

LEARNING_RATE: Final = 1.5e-3
EPOCHS: Final = 2
"""With three, the same calls teach no more and late steps can lose what was learned."""

MINIBATCH_ROWS: Final = 32
FULL_RATE_ROWS: Final = 64
"""Rows with an advantage at which a step has its full rate; see `grpo.train_step`. Late in the run one or two groups are left
with spread, and at full rate their noise undid a policy that succeeded 97 % of the time."""

CLIP_LOW: Final = 0.2
CLIP_HIGH: Final = 0.28
ENTROPY: Final = 0.0
"""Not needed: the depths are mixed so that a policy that never goes to the third row still sees what it misses."""

TEMPERATURE: Final = 1.0
"""Of sampling. Other values would train another distribution than the one that is measured."""

MAX_AHEAD: Final = 1
"""Steps that may be played ahead of the trainer, so samples are at most two versions old."""

MAX_STALENESS: Final = 2
"""Older samples are not used. The recipe is measured with one and two versions."""

CONCURRENT_ROLLOUTS: Final = 32
"""Rollouts in flight; the engine answers them in one batch."""
