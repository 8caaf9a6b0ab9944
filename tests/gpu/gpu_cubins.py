"""The kernels of the check, compiled ahead of time, on a machine without a GPU."""

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import gpu_machine  # finds npnorm and tests/
import gpu_sanitizer


def build_cubins(folder, options):
    """Compile every kernel that the check launches with these options, under the names that npnorm looks for."""
    os.environ["NPNORM_CACHE_DIR"] = str(folder.resolve())
    folder.mkdir(parents=True, exist_ok=True)
    from npnorm.cuda import cache

    specs = planned(options.only, options.cases)
    capability = tuple(map(int, options.capability.split(".")))
    begin = time.perf_counter()
    failed = 0
    manifest = {
        "capability": options.capability, "planned": len(specs), "kernels": 0, "versions": cache.versions(),
        "sources": cache._sources(),
    }  # fmt: skip
    _note(folder, manifest)
    with ProcessPoolExecutor(max(1, options.jobs), mp_context=get_context("spawn")) as pool:
        for number, (name, error) in enumerate(pool.map(_build, specs, [capability] * len(specs)), 1):
            if error:
                failed += 1
                print(f"FAILED {name}: {error}", flush=True)
            elif number % 25 == 0:
                print(f"{number} of {len(specs)}, {time.perf_counter() - begin:.0f} s", flush=True)
            manifest["kernels"] = number - failed
            _note(folder, manifest)
    files = cache.files(folder)
    print(f"{len(specs) - failed} of {len(specs)} kernels are in {folder}: {sum(files.values()) / 1e6:.1f} MB")
    return 1 if failed else 0


def _note(folder, manifest):
    """Write down what is there so far, whole or not at all: a build that is interrupted can be used."""
    beside = folder / "manifest.json.new"
    beside.write_text(json.dumps(manifest, indent=1) + "\n")
    beside.replace(folder / "manifest.json")


def planned(only=None, cases=None):
    """The specs of all kernels that the sections launch, or some sections, or some cases of the correctness."""
    machine = gpu_machine.Planned()
    for name, section in SECTIONS.items():
        if not only or name in only:
            section(machine, cases)
    return list(machine.specs)


def _correctness(machine, cases):
    from gpu_cases import check, chosen

    for case in chosen(cases):
        check(machine, case)


def _behaviour(name, machine, cases):
    import gpu_behaviour

    getattr(gpu_behaviour, name)(machine)


def _libraries(machine, cases):
    from gpu_behaviour import _right

    for values, weight in _library_arrays():
        _right(machine, values, weight)


def _speed(machine, cases):
    from gpu_peers import no_calls
    from gpu_speed import FORMATS, speed

    for format_ in FORMATS:
        for _ in speed(machine, format_, no_calls, lambda: True, lambda figures: None):
            pass


def _launch_cost(machine, cases):
    from gpu_peers import no_calls
    from gpu_speed import launch_costs

    launch_costs(machine, no_calls)


SECTIONS = {
    "correctness": _correctness,
    "streams": partial(_behaviour, "streams"),
    "graphs": partial(_behaviour, "graphs"),
    "large": partial(_behaviour, "large"),
    "libraries": _libraries,
    "speed": _speed,
    "launch cost": _launch_cost,
    "sanitizer": lambda machine, cases: _correctness(machine, "|".join(gpu_sanitizer.SANITIZED)),
}
"""The sections that launch kernels."""


def _library_arrays():
    from table import random

    for format_ in ("bfloat16", "float32"):
        yield random((40, 1000), format_), random(1000, format_, 1)


def _build(spec, capability):
    from npnorm.cuda import cache

    try:
        cache.cubin(spec, capability)
    except Exception as error:
        return repr(spec), f"{type(error).__name__}: {error}"[:500]
    return repr(spec), None


def take_cubins(folder):
    """Have npnorm look into a folder, for kernels that another installation has compiled."""
    os.environ["NPNORM_CACHE_DIR"] = str(folder.resolve())
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"--cubins must name a folder that --build-cubins has made; got {folder}, which has no manifest.json: "
            f"write --build-cubins {folder} first, which keeps the kernels that are there"
        ) from None
    from npnorm.cuda import cache

    if cache._sources() != manifest["sources"]:
        return "made of other sources: all are compiled here"
    # Machine code runs without the compilers that made it; their versions are part of its name all the same.
    cache.versions = lambda: tuple(manifest["versions"])
    return f"{manifest['kernels']} of {manifest['planned']} kernels for {manifest['capability']}"
