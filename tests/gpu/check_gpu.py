"""All that needs a GPU, in one command: versions, right results, times beside a copy and beside other libraries.

    python tests/gpu/check_gpu.py --build-cubins build/cubins     # before, anywhere: kernels for sm_90, no GPU needed
    python tests/gpu/check_gpu.py --cubins build/cubins --json build/gpu.json --markdown build/gpu.md
    python tests/gpu/check_gpu.py --dry-run                       # tries the check itself out, on the host

Each section stands by itself: what fails in one is reported, and the next runs. What was found so far is written after
each. The exit status is 1 if a result is wrong or a section breaks off, 0 if not; times decide nothing.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import gpu_sanitizer  # noqa: E402

PACKAGES = (
    *("npnorm", "numpy", "ml_dtypes", "numba", "numba-cuda", "cuda-core", "cuda-bindings", "nvidia-nvvm"),
    *("nvidia-nvjitlink", "nvidia-cuda-nvcc", "torch", "triton", "liger-kernel", "cupy-cuda13x", "cupy-cuda12x"),
)

COMPILED_COLUMNS = (1024, 4096, 16384)
"""Widths at which PyTorch's compiler is measured, which takes seconds for each."""


def main():
    options = parsed()
    if options.build_cubins:
        from gpu_cubins import build_cubins

        return build_cubins(Path(options.build_cubins), options)
    check = Check(options)
    names = [name for name in SECTIONS if not options.only or name in options.only]
    for number, name in enumerate(names, 1):
        check.run(name, SECTIONS[name])
        if check.is_lost():
            check.go_on(names[number:])
            break
    return check.end()


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cubins", metavar="FOLDER", help="kernels that --build-cubins has made")
    parser.add_argument("--build-cubins", metavar="FOLDER", help="compile the kernels of --only, --cases, and end")
    parser.add_argument("--capability", default="9.0", help="of the device that --build-cubins is for (9.0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes of --build-cubins")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--markdown", metavar="FILE", help="write tables for the documentation")
    parser.add_argument("--budget", type=float, default=170, metavar="SECONDS", help="time for all of it (170)")
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), help="these sections")
    parser.add_argument("--cases", help="of the correctness, those whose names are given, with | between them")
    parser.add_argument("--no-peers", action="store_true", help="npnorm alone")
    parser.add_argument("--dry-run", action="store_true", help="on host memory, with the reference for kernels")
    options = parser.parse_args()
    if options.only:
        options.only = ["versions", *(name for name in options.only if name != "versions")]  # it finds the device
    return options


class Check:
    """What is found, and the time that is left."""

    def __init__(self, options):
        self.options, self.start = options, time.perf_counter()
        self.failed, self.machine, self.compiled = [], None, []
        self.results = {
            "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(sys.argv),
            "dry_run": options.dry_run,
            "sections": {},
        }

    def left(self):
        return self.options.budget - (time.perf_counter() - self.start)

    def run(self, name, section):
        begin = time.perf_counter()
        print(f"== {name}", flush=True)
        found = self.results["sections"][name] = {}
        if self.left() < 1:
            found["status"] = "skipped: no time is left"
        elif self.machine is None and name != "versions":
            found["status"] = "skipped: there is no device"
        else:
            try:
                found["status"] = section(self, found) or "passed"
            except Exception as error:
                traceback.print_exc(limit=4)
                found["status"] = f"FAILED: {type(error).__name__}: {error}"[:1000]
        found["seconds"] = round(time.perf_counter() - begin, 1)
        if found["status"].startswith("FAILED"):
            self.failed.append(name)
        print(f"   {name}: {found['status']} ({found['seconds']} s)", flush=True)
        self.write()

    def is_lost(self):
        """Whether the device no longer works for this process, as after an access to a wrong address."""
        try:
            if self.machine is not None:
                self.machine.synchronize()
        except Exception:
            return True
        return False

    def go_on(self, names):
        """The rest in another process: the sections named, and the cases that are left."""
        sections, options = self.results["sections"], self.options
        cases = sections.get("correctness", {}).pop("left", [])
        names = ["correctness"] * bool(cases) + names
        if not names or self.left() < 5:
            return
        print("   the device no longer works for this process: the rest runs in another", flush=True)
        with TemporaryDirectory() as folder:
            figures = Path(folder) / "rest.json"
            command = [
                *(sys.executable, __file__, "--only", "versions", *names, "--json", str(figures)),
                *("--budget", str(self.left()), *["--cases", "|".join(cases)][: 2 * bool(cases)]),
                *(("--cubins", options.cubins) if options.cubins else ()),
                *["--no-peers"] * options.no_peers,
                *["--dry-run"] * options.dry_run,
            ]
            subprocess.run(command)
            found = json.loads(figures.read_text())
        for name, section in found["sections"].items():
            if name == "correctness":
                sections[name]["cases"] |= section["cases"]
            elif name != "versions":
                sections[name] = section
            if section["status"].startswith("FAILED") and name not in self.failed:
                self.failed.append(name)
        self.compiled += found["compiled_here"]

    def write(self):
        if self.options.json:
            path = Path(self.options.json)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.results, indent=1, default=str) + "\n")

    def end(self):
        self.results["compiled_here"] = self.compiled
        self.results["seconds"] = round(time.perf_counter() - self.start, 1)
        self.results["passed"] = not self.failed
        self.write()
        print(f"\n{len(self.compiled)} kernels were compiled here, in {sum(each[1] for each in self.compiled):.0f} s")
        for name, found in self.results["sections"].items():
            print(f"{name:<14} {found['seconds']:6.1f} s  {found['status']}")
        if self.options.markdown:
            from gpu_report import markdown

            path = Path(self.options.markdown)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(markdown(self.results, "make check-gpu"))
        skipped = [n for n, found in self.results["sections"].items() if not found["status"].startswith("passed")]
        if self.failed:
            print(f"FAILED: {', '.join(self.failed)}")
        else:
            print("nothing failed" + (f"; not complete: {', '.join(skipped)}" if skipped else ""))
        return 1 if self.failed else 0

    def peers(self, compiled=False):
        """A function that names other libraries' calls."""
        import gpu_peers

        if self.options.no_peers or not self.machine.real or not gpu_peers.has_torch():
            return gpu_peers.no_calls
        return gpu_peers.calls(self.machine.elements, compiled)


# Sections. Each gets the check and the dictionary of its figures, and returns what became of it if it has not passed.


def versions(check, found):
    found["python"] = platform.python_version()
    found["packages"] = {name: _version(name) for name in PACKAGES}
    print("   python", found["python"], *(f"{name} {v}" for name, v in found["packages"].items() if v))
    print("   not installed:", ", ".join(name for name, v in found["packages"].items() if not v))
    found["compute_sanitizer"] = gpu_sanitizer.program()
    if check.options.cubins:
        from gpu_cubins import take_cubins

        found["cubins"] = take_cubins(Path(check.options.cubins))
        print("   cubins:", found["cubins"])
    check.machine = _machine(check, found)
    found["device"] = check.machine.about()
    print("  ", found["device"], flush=True)


def _version(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine(check, found):
    import gpu_machine

    from npnorm.cuda import cache, driver

    if check.options.dry_run:
        return gpu_machine.Simulated()
    missing = driver.missing()
    if missing == ["numba_cuda"] and check.options.cubins:
        found["note"] = "numba-cuda is not installed: kernels that are not among the cubins fail"
        print("  ", found["note"])
        driver.NEEDED = tuple(name for name in driver.NEEDED if name not in missing)
    compile_ = cache._compile

    def compile_and_note(spec, capability):
        begin = time.perf_counter()
        result = compile_(spec, capability)
        check.compiled.append((repr(spec), round(time.perf_counter() - begin, 2)))
        return result

    cache._compile = compile_and_note
    return gpu_machine.Gpu()


def ceilings(check, found):
    from gpu_speed import ceilings

    found["rows"] = ceilings(check.machine)
    for row in found["rows"]:
        print(
            f"   copy of {row['bytes'] / 2**20:7.1f} MiB: {row['memcpy'] / 1e12:.3f} TB/s by the driver, "
            f"{row['kernel'] / 1e12:.3f} TB/s by a kernel"
        )


def correctness(check, found):
    from gpu_cases import check as run_case
    from gpu_cases import chosen

    found["cases"], failed, skipped = {}, [], 0
    cases = chosen(check.options.cases)
    for number, case in enumerate(cases, 1):
        if check.left() < 2:
            skipped += 1
            continue
        begin = time.perf_counter()
        try:
            worst = run_case(check.machine, case)
            outcome = f"largest error {worst:.3f} of its bound"
        except Exception as error:
            failed.append(case.name)
            outcome = f"FAILED: {type(error).__name__}: {error}"[:600]
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=-4)
        found["cases"][case.name] = outcome
        print(f"   {case.name:<24} {outcome} ({time.perf_counter() - begin:.2f} s)", flush=True)
        if case.name in failed and check.is_lost():
            found["left"] = [case.name for case in cases[number:]]
            break
    if failed:
        return f"FAILED: {len(failed)} of {len(found['cases'])} cases: {', '.join(failed)}"
    return f"passed {len(found['cases'])} cases" + (f"; skipped for time: {skipped}" if skipped else "")


def behaviour(name, check, found):
    import gpu_behaviour

    found.update(getattr(gpu_behaviour, name)(check.machine))
    print("  ", found, flush=True)
    if any(str(value).startswith("FAILED") for value in found.values()):
        return "FAILED: " + ", ".join(key for key, value in found.items() if str(value).startswith("FAILED"))


def speed(check, found):
    import gpu_peers
    from gpu_report import goals, line
    from gpu_speed import FORMATS, GOALS, speed

    found["rows"] = []
    for i, format_ in enumerate(FORMATS):
        # Each format gets its share of what is left, but for what comes after.
        end = time.perf_counter() + (check.left() - 10) * (0.55 if i == 0 else 0.75)
        rows = speed(
            check.machine, format_, check.peers(), lambda end=end: time.perf_counter() < end,
            lambda figures: print("  ", line(figures), flush=True),
        )  # fmt: skip
        for figures in rows:
            found["rows"].append(figures)
        if check.peers() is not gpu_peers.no_calls:
            gpu_peers.free()
    if check.machine.real:
        found["goals"] = goals(found["rows"], GOALS)
        print(found["goals"])


def launch_cost(check, found):
    import gpu_peers
    from gpu_machine import host_seconds
    from gpu_speed import launch_costs

    peers = check.peers()
    found["costs"] = launch_costs(check.machine, peers)
    if peers is not gpu_peers.no_calls:
        for operation, costs in found["costs"].items():
            for name, call in gpu_peers.npnorm_on_tensors(operation, "bfloat16", 8, 1024).items():
                costs[name] = host_seconds(check.machine, call)
    for operation, costs in found["costs"].items():
        shown = [
            f"{name} {1e6 * cost:.1f}" if isinstance(cost, float) else f"{name}: {cost}"
            for name, cost in costs.items()
        ]
        print(f"   us on the host, {operation}:", ", ".join(shown))


def compiled(check, found):
    """What PyTorch's compiler makes of the same norms, with Triton."""
    import gpu_peers
    from gpu_machine import seconds

    peers = check.peers(compiled=True)
    found["rows"] = []
    if peers is gpu_peers.no_calls:
        return "skipped: no PyTorch with a device"
    for cols in COMPILED_COLUMNS:
        for operation in ("layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward"):
            if check.left() < 12:
                return f"passed in part: {len(found['rows'])} cells, no time is left"
            rows = check.machine.elements // cols
            for name, calls in peers(operation, "bfloat16", rows, cols):
                try:
                    taken = seconds(check.machine, calls())[0]
                    print(f"   {name}, {operation}, {rows} x {cols}: {1e6 * taken:.1f} us", flush=True)
                except Exception as error:
                    taken = None
                    print(f"   {name}, {operation}: {type(error).__name__}: {error}"[:300], flush=True)
                row = {"operation": operation, "format": "bfloat16", "cols": cols, "peers": {name: taken}}
                found["rows"].append(row)


SECTIONS = {
    "versions": versions,
    "ceilings": ceilings,
    "correctness": correctness,
    "streams": partial(behaviour, "streams"),
    "graphs": partial(behaviour, "graphs"),
    "libraries": partial(behaviour, "libraries"),
    "large": partial(behaviour, "large"),
    "launch cost": launch_cost,
    "speed": speed,
    "sanitizer": gpu_sanitizer.sanitizer,
    "compiled": compiled,
}


if __name__ == "__main__":
    sys.exit(main())
