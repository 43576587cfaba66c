"""Kernels for Warp, whose source it takes from functions at module level. Imported inside tests only."""

import warp as wp
from warp import fem


@wp.kernel
def add_one(a: wp.array(dtype=wp.float32)):  # type: ignore[valid-type]
    i = wp.tid()
    a[i] = a[i] + 1.0


@wp.kernel
def spin_then_fill(rounds: int, a: wp.array(dtype=wp.float32), value: float):  # type: ignore[valid-type]
    """Take a while (each round has a sine, on the one before it), then write."""
    i = wp.tid()
    x = float(i)
    for _ in range(rounds):
        x = wp.sin(x)
    a[i] = value + 0.0 * x


@wp.kernel
def count_near(
    grid: wp.uint64,
    points: wp.array(dtype=wp.vec3),  # type: ignore[valid-type]
    radius: float,
    counts: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
):
    i = wp.tid()
    for j in wp.hash_grid_query(grid, points[i], radius):
        if wp.length(points[i] - points[j]) <= radius:
            counts[i] += 1


@wp.kernel
def count_overlaps(
    bvh: wp.uint64,
    lowers: wp.array(dtype=wp.vec3),  # type: ignore[valid-type]
    uppers: wp.array(dtype=wp.vec3),  # type: ignore[valid-type]
    counts: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
):
    i = wp.tid()
    query = wp.bvh_query_aabb(bvh, lowers[i], uppers[i])
    found = int(0)  # noqa: UP018, RUF046 - Warp takes a plain 0 for a constant
    while wp.bvh_query_next(query, found):
        counts[i] += 1


@fem.integrand
def one(s: fem.Sample):
    return 1.0
