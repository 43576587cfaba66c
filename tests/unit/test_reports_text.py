import pytest
from rich.table import Table

from rmm_managed_bridge.reports.text import format_site, shorten_left, to_text


def test_text_that_fits_is_left_alone() -> None:
    assert shorten_left("sim/main.py", 11) == "sim/main.py"


def test_path_is_cut_at_a_separator() -> None:
    assert shorten_left("/srv/projects/sim/main.py", 14) == "…/sim/main.py"


def test_windows_path_is_cut_at_a_separator() -> None:
    assert shorten_left(r"C:\projects\sim\main.py", 14) == r"…\sim\main.py"


def test_long_file_name_keeps_as_much_as_fits() -> None:
    assert shorten_left("/srv/a_very_long_module_name.py", 12) == "…ule_name.py"


@pytest.mark.parametrize("width", range(2, 40))
def test_shortened_text_is_never_wider_than_asked(width: int) -> None:
    text = "/srv/projects/simulation/solver/main.py"
    shortened = shorten_left(text, width)
    assert len(shortened) <= width
    assert text.endswith(shortened.removeprefix("…"))


def test_width_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="width=1"):
        shorten_left("abc", 1)


def test_site_keeps_its_line_number() -> None:
    site = format_site("/srv/projects/simulation/main.py", 1234, 16)
    assert site == "…/main.py:1234"


def test_site_without_a_line_is_just_the_file() -> None:
    assert format_site("native", 0, 16) == "native"


def test_text_has_no_colours_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    table = Table("a" * 30, header_style="bold red")
    text = to_text(table, width=60)
    assert "a" * 30 in text
    assert "\x1b" not in text


def test_text_has_no_trailing_blanks() -> None:
    table = Table("name", title="t", title_justify="left")
    assert all(line == line.rstrip() for line in to_text(table, width=60).splitlines())
