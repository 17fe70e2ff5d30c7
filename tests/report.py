"""What the suites reached, printed at the end of a run: a figure that nobody sees is no figure."""

SECTIONS: dict[str, list[str]] = {}


def say(section, line):
    """Print `line` under `section` at the end of the run."""
    SECTIONS.setdefault(section, []).append(line)
