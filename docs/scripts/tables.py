"""What the table scripts share: the machine in words, Markdown tables, and where they go."""

import contextlib
import datetime
import os
import platform
import re
from pathlib import Path

import peers

DOCS = Path(__file__).resolve().parents[1]
README = DOCS.parent / "README.md"


def machine():
    """The processor in words: ``AMD EPYC, 2 CPUs, x86_64, Linux``."""
    name = platform.processor() or "unknown processor"
    with contextlib.suppress(OSError, AttributeError):
        name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()).group(1)
    return f"{name}, {os.cpu_count()} CPUs, {platform.machine()}, {platform.system()}"


def provenance(command):
    """One paragraph: when, where, with what and how a table was made."""
    return (
        f"Measured on {datetime.date.today()}: {machine()}; Python {platform.python_version()}, "
        f"{peers.versions('numpy', 'numba', 'torch', 'onnxruntime')}.\n"
        f"Command: `{command}`."
    )


def markdown(header, rows):
    """A Markdown table, the first column left-aligned and the others right-aligned."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def publish(name, text, summary=None):
    """Write docs/_generated/NAME.md, and the summary (or text) between README's NAME marks."""
    (DOCS / "_generated").mkdir(exist_ok=True)
    (DOCS / "_generated" / f"{name}.md").write_text(text + "\n")
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    readme = README.read_text()
    before, rest = readme.split(begin)
    after = rest.split(end)[1]
    README.write_text(f"{before}{begin}\n{summary or text}\n{end}{after}")
    print(text)
