"""Refuse source files above 500 lines, and point out those above 300."""

import sys
from pathlib import Path

SUFFIXES = frozenset({".py", ".pyx", ".pxd", ".hpp", ".cpp"})
NOTICE_LINES = 300
REFUSE_LINES = 500


def check(folders: list[Path]) -> tuple[list[str], list[str]]:
    """Return findings and notices for the source files under `folders`."""
    findings: list[str] = []
    notices: list[str] = []
    for folder in folders:
        paths = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
        if not paths:
            findings.append(f"{folder}:1: no source file here; name a folder that holds some")
        for path in paths:
            count = len(path.read_bytes().splitlines())
            if count > REFUSE_LINES:
                findings.append(f"{path}:{REFUSE_LINES + 1}: {count} lines, above {REFUSE_LINES}; split the file")
            elif count > NOTICE_LINES:
                notices.append(
                    f"{path}:{NOTICE_LINES + 1}: notice: {count} lines, above {NOTICE_LINES}; consider a split"
                )
    return findings, notices


def main() -> int:
    """Check the folders given, or those of this repository."""
    folders = sys.argv[1:] or ["rmm_managed_bridge", "tests", "ci"]
    findings, notices = check([Path(folder) for folder in folders])
    print("\n".join(notices + findings) or "file length: nothing wrong")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
