"""compute-sanitizer, over processes of their own that run a few cases."""

import shutil
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().with_name("check_gpu.py")

SANITIZED = ("LN bf16", "RMS bare", "D = 7", "odd D", "D = 16,384", "rows apart, odd", "add RMS bf16")
"""Cases that compute-sanitizer sees."""

LONGEST = 75
"""Seconds for one of its tools."""

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def program():
    """Where compute-sanitizer is; None if it is not installed."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def sanitizer(check, found):
    """compute-sanitizer, over a process of its own for each of its tools."""
    tool_path = program()
    if tool_path is None or not check.machine.real:
        return "skipped: compute-sanitizer is not installed" if tool_path is None else "skipped: not simulated"
    bad = []
    for tool in TOOLS:
        if check.left() < 15:
            found[tool] = "skipped: no time is left"
            continue
        command = [
            *(tool_path, "--tool", tool, "--error-exitcode", "99"),
            *(sys.executable, str(PROGRAM), "--only", "versions", "correctness"),
            *("--cases", "|".join(SANITIZED), "--budget", str(min(60, check.left()))),
            *(("--cubins", check.options.cubins) if check.options.cubins else ()),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=min(LONGEST, check.left()))
        except subprocess.TimeoutExpired:
            found[tool] = "skipped: it takes too long"
            continue
        text = done.stdout + done.stderr
        last = [row for row in text.splitlines() if row.startswith("=========")][-1:]
        if "not supported" in text and "ERROR SUMMARY: 0" not in text:
            found[tool] = "skipped: it does not work on this machine"
        elif done.returncode == 0:
            found[tool] = f"passed: {' '.join(last)}"
        else:
            found[tool] = f"FAILED with status {done.returncode}: {' '.join(last)}"
            found[f"{tool} output"] = text[-6000:]
            print(text[-2500:])
            bad.append(tool)
        print("  ", tool, found[tool], flush=True)
    if bad:
        return f"FAILED: {', '.join(bad)}"
    passed = [tool for tool in TOOLS if found[tool].startswith("passed")]
    return f"passed {', '.join(passed)}" if passed else "skipped: " + "; ".join(dict.fromkeys(found.values()))
