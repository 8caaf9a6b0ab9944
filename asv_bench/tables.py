"""What the tables share: the machine in words, Markdown, and the places in the README."""

import contextlib
import datetime
import os
import platform
import re
import sys
from pathlib import Path

from benchmarks import peers

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
GENERATED = ROOT / "docs" / "_generated"


def machine():
    """The processor in words: ``AMD EPYC, 2 CPUs, x86_64, Linux``."""
    name = platform.processor() or "unknown processor"
    with contextlib.suppress(OSError, AttributeError):
        name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()).group(1)
    return f"{name}, {os.cpu_count()} CPUs, {platform.machine()}, {platform.system()}"


def command():
    """The command that is running, as a reader would type it in the repository."""
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    return " ".join(["python", str(script), *sys.argv[1:]])


def provenance():
    """When, where and with what a table was made, by name."""
    return {
        "date": str(datetime.date.today()),
        "machine": machine(),
        "versions": f"Python {platform.python_version()}, " + peers.versions("numpy", "numba", *peers.NAMES),
        "command": command(),
    }


MADE = "<!-- made -->"  # stands before the footer, so that a page can include that alone


def footer(made=None):
    """The same, of this run or of an earlier one, in a paragraph."""
    made = provenance() if made is None else made
    return f"{MADE}\nMeasured on {made['date']}: {made['machine']}; {made['versions']}.\nCommand: `{made['command']}`."


def markdown(header, rows):
    """A Markdown table, the first column left-aligned and the others right-aligned."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def add_outputs(parser, text, drawing, quick):
    """The options of every script that measures: where its results go, and how long it takes."""
    parser.add_argument("--markdown", metavar="FILE", help=f"write {text} there")
    parser.add_argument("--json", metavar="FILE", help="write every figure there")
    parser.add_argument("--from-json", metavar="FILE", help="measure nothing: take the figures that --json wrote")
    parser.add_argument("--plot", metavar="FILE", help=f"draw {drawing}: .svg, .png, and more files named after it")
    parser.add_argument("--quick", action="store_true", help=f"{quick}: a trial")


def write(path, text):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.rstrip("\n") + "\n")


def put_in_readme(name, text):
    """Replace what stands between README's marks of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = README.read_text().split(begin)
    after = rest.split(end)[1]
    README.write_text(f"{before}{begin}\n{text}\n{end}{after}")
