"""Write docs/_generated/example_*.md: what the examples print.

Run from the repository, on a quiet machine: ``python docs/scripts/run_examples.py``, with names of examples
or for all that run without a GPU. They need the extra `example` and the model that `make demo` installs.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "asv_bench"))

import tables  # noqa: E402

EXAMPLES = ["sentence_embeddings", "train_tiny_gpt", "njit_recurrence"]


def main(names):
    for name in names or EXAMPLES:
        command = ["python", f"examples/{name}.py"]
        search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": search}
        run = [sys.executable, *command[1:]]
        output = subprocess.run(run, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        output = output.stdout.strip("\n")
        text = f"```text\n$ {' '.join(command)}\n{output}\n```\n\n"
        made = f"```{{container}} made\n{tables.footer(tables.provenance() | {'command': ' '.join(command)})}\n```"
        tables.write(tables.GENERATED / f"example_{name}.md", text + made)


if __name__ == "__main__":
    main(sys.argv[1:])
