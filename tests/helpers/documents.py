"""The Python blocks of the README and the guide, and what has to be there before each can run."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs/guide").glob("*.md")))

_FENCE = re.compile(r"^(?:<!-- example: needs (?P<needs>[\w ]+) -->\n)?```python\n(?P<code>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """One block of a page. `needs`: names of `requires` without which it cannot run."""

    page: str
    line: int
    code: str
    needs: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def program(self) -> str:
        """The block as it is written, after what its page takes for granted."""
        return "".join(SETUP[key] for key in self.set_up) + self.code

    @property
    def set_up(self) -> list[tuple[str, str]]:
        """The keys of `SETUP` that are for this block."""
        return [(page, start) for page, start in SETUP if page == self.page and self.code.startswith(start)]


def blocks_of(page: str) -> list[Block]:
    """Return the Python blocks of one page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start("code")), found["code"], tuple((found["needs"] or "").split()))
        for found in _FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]

_IMPORTS = """
import numpy as np
import rmm_managed_bridge as bridge
"""
_HOST = (
    _IMPORTS
    + """
bridge.install("host")
np.ones(1 << 20, np.float32).tofile("field.f32")
x = field = np.ones(1 << 20, np.float32)
scratch = np.ones(1 << 20)
stream = 0
"""
)
_GPU = (
    _IMPORTS
    + """
import cupy as cp, cupy
import warp as wp
"""
)
# By page and the beginning of the block, so that a block which is rewritten asks for its set-up again.
SETUP: dict[tuple[str, str], str] = {
    ("docs/guide/sharing.md", "bridge.install("): _IMPORTS,
    ("docs/guide/sharing.md", "points ="): f"{_HOST}\nimport warp as wp\n",
    ("docs/guide/sharing.md", "with cupy.cuda.using_allocator"): f"""{_GPU}
bridge.install("managed", initial_pool_size="256MiB")
""",
    ("docs/guide/sharing.md", "shared = np.from_dlpack"): _HOST,
    ("docs/guide/sharing.md", "tensor ="): f"""import torch{_IMPORTS}
bridge.install("managed", initial_pool_size="256MiB")
field = np.ones(1000, np.float32)
""",
    ("docs/guide/leaks.md", 'with bridge.record("program'): _HOST,
    ("docs/guide/memory.md", "x = np.ones("): _HOST,
    ("docs/guide/memory.md", "before = "): _HOST,
    ("docs/guide/memory.md", "bridge.reset_peak()"): _HOST,
    ("docs/guide/testing.md", "def test_smooth"): _IMPORTS,
    ("docs/guide/libraries.md", "def smooth"): _IMPORTS,
    ("docs/guide/libraries.md", "def to_device"): f"{_IMPORTS}\nimport warp as wp\n",
    ("docs/guide/libraries.md", "@bridge.numpy_allocator"): _IMPORTS,
    ("docs/guide/libraries.md", "pool = "): f"import rmm{_IMPORTS}",
    ("docs/guide/extensions.md", "import contextvars"): _IMPORTS,
    ("docs/guide/backends.md", "print(bridge.detect_backend"): _IMPORTS,
    ("docs/guide/backends.md", "try:"): _IMPORTS,
    ("docs/guide/backends.md", "bridge.uninstall()"): _IMPORTS,
    ("docs/guide/provenance.md", "def largest"): _HOST,
    ("docs/guide/provenance.md", "bridge.record_events"): _HOST,
    ("docs/guide/provenance.md", "import warnings"): f"{_HOST}\nprogram = bridge.status\n",
    ("docs/guide/access.md", "bridge.memory_kind(x)"): _HOST,
    ("docs/guide/provenance.md", 'with bridge.tag("load")'): _HOST,
    ("docs/guide/hints.md", "bridge.prefetch(field"): _HOST,
    ("docs/guide/limits.md", "cache = {}"): _IMPORTS,
    ("docs/guide/limits.md", 'bridge.install(pool="debug")'): _IMPORTS,
    ("docs/guide/capture.md", "a, b = cp.zeros(n)"): f"""{_GPU}
bridge.install("managed", initial_pool_size="256MiB")
n = 1000
""",
    ("docs/guide/devices.md", "rmm.reinitialize("): f"import rmm{_IMPORTS}",
    ("docs/guide/hints.md", 'bridge.install(hints="device")'): f"""import rmm{_GPU}
rmm.reinitialize(pool_allocator=True, managed_memory=True, initial_pool_size="256MiB")
np.save("table.npy", np.ones(1 << 20))
with bridge.installed("managed"):
    field = np.ones(1 << 20)
""",
    ("docs/guide/streams.md", "side = cupy.cuda.Stream"): f"""{_GPU}
bridge.install("managed", initial_pool_size="256MiB")
x = cp.ones(1 << 20, cp.float32)
kernel = cp.RawKernel('extern "C" __global__ void twice(float* x) {{ x[threadIdx.x] *= 2; }}', "twice")
grid, block = (1,), (32,)
""",
    ("docs/guide/torch.md", "bridge.install(frameworks="): f"""import rmm, torch{_GPU}
rmm.reinitialize(pool_allocator=True, managed_memory=True, initial_pool_size="256MiB")

@wp.kernel
def step(positions: wp.array(dtype=wp.vec3), forces: wp.array(dtype=wp.vec3)):
    i = wp.tid()
    forces[i] = positions[i]
""",
}
