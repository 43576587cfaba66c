import numpy as np
import pytest

from rmm_managed_bridge.cli.demo.photograph import prepare_field
from rmm_managed_bridge.cli.demo.wave import (
    COURANT_SQUARED,
    Check,
    Field,
    energy,
    exact_solution,
    first_step,
    median_wavelength,
    relative_error,
    rounding_limit,
    run_on_plain_numpy,
    step,
)


@pytest.fixture
def initial() -> Field:
    image = np.random.default_rng(7).random((90, 70), np.float32)
    return prepare_field(image, 64)


@pytest.mark.parametrize("steps", [1, 2, 37, 400])
def test_stepping_gives_the_exact_solution(initial: Field, steps: int) -> None:
    stepped = run_on_plain_numpy(initial, steps)
    assert relative_error(stepped, exact_solution(initial, steps)) < rounding_limit(steps)


def test_exact_solution_of_no_step_is_the_initial_field(initial: Field) -> None:
    assert relative_error(exact_solution(initial, 0), initial) < 1e-6


def test_exact_solution_holds_on_a_rectangle() -> None:
    field = np.random.default_rng(7).random((40, 26), np.float32)
    assert relative_error(run_on_plain_numpy(field, 50), exact_solution(field, 50)) < rounding_limit(50)


def test_cosine_swings_with_its_own_period() -> None:
    rows = 64
    mode = np.cos(np.pi * (np.arange(rows) + 0.5) * 4 / rows).astype(np.float32)
    field = np.repeat(mode[:, None], 16, axis=1)
    angle = np.arccos(1 - 2 * COURANT_SQUARED * np.sin(np.pi * 4 / (2 * rows)) ** 2)
    expected = (field * np.cos(100 * angle)).astype(np.float32)
    assert np.allclose(run_on_plain_numpy(field, 100), expected, atol=2e-5)


def test_energy_is_conserved(initial: Field) -> None:
    previous, current = initial.copy(), first_step(initial)
    following = np.empty_like(current)
    before = energy(previous, current)
    for _ in range(300):
        step(previous, current, following)
        previous, current, following = current, following, previous
    assert before > 0
    assert energy(previous, current) == pytest.approx(before, rel=rounding_limit(300))


def test_mean_displacement_is_conserved() -> None:
    field = np.random.default_rng(7).random((64, 64), np.float32)
    assert run_on_plain_numpy(field, 200).mean(dtype=np.float64) == pytest.approx(
        field.mean(dtype=np.float64), rel=1e-5
    )


def test_one_lost_step_is_seen_by_both_comparisons(initial: Field) -> None:
    one_short = run_on_plain_numpy(initial, 399)
    assert relative_error(one_short, run_on_plain_numpy(initial, 400)) > 100 * rounding_limit(400)
    assert relative_error(one_short, exact_solution(initial, 400)) > 100 * rounding_limit(400)


def test_damped_wave_is_seen_by_the_energy(initial: Field) -> None:
    later = first_step(initial)
    before = energy(initial, later)
    after = energy(initial * np.float32(0.999), later * np.float32(0.999))
    assert abs(after / before - 1) > 10 * rounding_limit(400)


def test_number_that_is_none_does_not_pass() -> None:
    assert Check("value", 1e-6, 1e-5).passed
    assert not Check("value", 1e-4, 1e-5).passed
    assert not Check("value", float("nan"), 1e-5).passed


@pytest.mark.parametrize("waves", [4, 16])
def test_median_wavelength_of_one_wave_is_its_own(waves: int) -> None:
    wave = np.sin(2 * np.pi * waves * np.arange(128) / 128).astype(np.float32)
    assert median_wavelength(np.repeat(wave[:, None], 128, axis=1)) == pytest.approx(128 / waves)


@pytest.mark.parametrize("size", [64, 200])
def test_prepared_field_is_square_and_zero_on_average(size: int) -> None:
    image = np.random.default_rng(7).random((90, 70), np.float32)
    field = prepare_field(image, size)
    assert field.shape == (size, size)
    assert field.dtype == np.float32
    assert field.flags.c_contiguous
    assert field.flags.owndata
    assert abs(field.mean(dtype=np.float64)) < 1e-6


def test_prepared_field_is_the_same_way_up_as_the_photograph() -> None:
    image = np.zeros((80, 80), np.float32)
    image[:40, 40:] = 1
    field = prepare_field(image, 64)
    assert field[:24, 40:].min() > 0 > field[40:, :24].max()
    assert field[40:, 40:].max() < 0
