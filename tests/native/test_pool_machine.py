"""Invariants 1-3, 5, 6, 9 and 12 over the real pool, driven by Hypothesis against a model of what is still in use.

The model does what a careful program does: it uses a block only on the stream it was allocated on and on those it was
shown to, and where it states a stream at a free, it has ordered the block's own stream before that one. Then every
block that comes out of the pool must be safe for whoever asked. BRIDGE_MACHINE_EXAMPLES makes a long run of it,
BRIDGE_MACHINE_RAW leaves failures as they were found.
"""

import pytest
from helpers.pool_memory import PoolMachine, run_machine

pytestmark = pytest.mark.fake_driver


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_pool_is_safe_in_every_interleaving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic as it stands; random and as long as wanted with BRIDGE_MACHINE_EXAMPLES."""
    run_machine(PoolMachine, monkeypatch)
