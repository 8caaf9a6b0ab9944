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


def footer():
    """The same in a paragraph."""
    made = provenance()
    return f"Measured on {made['date']}: {made['machine']}; {made['versions']}.\nCommand: `{made['command']}`."


def markdown(header, rows):
    """A Markdown table, the first column left-aligned and the others right-aligned."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def add_outputs(parser, text, drawing, quick):
    """The options of every script that measures: where its results go, and how long it takes."""
    parser.add_argument("--markdown", metavar="FILE", help=f"write {text} there")
    parser.add_argument("--json", metavar="FILE", help="write every figure there")
    parser.add_argument("--plot", metavar="FILE", help=f"draw {drawing}: .svg, .png")
    parser.add_argument("--quick", action="store_true", help=f"{quick}: a trial")


def write(path, text):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.rstrip("\n") + "\n")


def pyplot():
    """Matplotlib without a screen, which makes the same file from the same figures."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs Matplotlib")
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "npnorm"
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure, path):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)


def figure_link(arguments, words):
    """The line that shows the plot, if there is one, in the page that --markdown writes."""
    if not arguments.plot:
        return ""
    link = os.path.relpath(Path(arguments.plot).resolve(), Path(arguments.markdown).resolve().parent)
    return f"![{words}]({Path(link).as_posix()})\n\n"


def put_in_readme(name, text):
    """Replace what stands between README's marks of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = README.read_text().split(begin)
    after = rest.split(end)[1]
    README.write_text(f"{before}{begin}\n{text}\n{end}{after}")
