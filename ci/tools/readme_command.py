"""Print the commands of the fenced block that follows a marker comment in a Markdown file."""

import re
import sys
from pathlib import Path


def find_command(text: str, marker: str) -> str:
    """Return the lines of the first fenced block after ``<!-- marker -->``.

    Raises
    ------
    ValueError
        If the marker is not there exactly once, or no block with a command in it follows directly.
    """
    parts = text.split(f"<!-- {marker} -->")
    if len(parts) != 2:
        raise ValueError(f"'<!-- {marker} -->' occurs {len(parts) - 1} times; write it once, before the block")
    block = re.match(r"\s*^```\w*\n(.*?)^```\s*$", parts[1], re.DOTALL | re.MULTILINE)
    if block is None or not block[1].strip():
        raise ValueError(f"no fenced block with a command follows '<!-- {marker} -->'; write one on the next line")
    return block[1].strip()


def main() -> int:
    """Print the command of MARKER in FILE."""
    file, marker = sys.argv[1:]
    try:
        print(find_command(Path(file).read_text(encoding="utf-8"), marker))
    except ValueError as error:
        print(f"{file}:1: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
