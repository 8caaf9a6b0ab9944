"""The kernels of the check, compiled ahead of time, on a machine without a GPU."""

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import gpu_machine  # finds npnorm and tests/


def build_cubins(folder, options):
    """Compile every kernel that the check launches, under the names that npnorm looks for."""
    os.environ["NPNORM_CACHE_DIR"] = str(folder.resolve())
    folder.mkdir(parents=True, exist_ok=True)
    from npnorm.cuda import cache

    specs = planned()
    capability = tuple(map(int, options.capability.split(".")))
    begin = time.perf_counter()
    failed = 0
    with ProcessPoolExecutor(max(1, options.jobs), mp_context=get_context("spawn")) as pool:
        for number, (name, error) in enumerate(pool.map(_build, specs, [capability] * len(specs)), 1):
            if error:
                failed += 1
                print(f"FAILED {name}: {error}", flush=True)
            elif number % 25 == 0:
                print(f"{number} of {len(specs)}, {time.perf_counter() - begin:.0f} s", flush=True)
    files = cache.files(folder)
    manifest = {
        "capability": options.capability, "kernels": len(specs) - failed, "versions": cache.versions(),
        "sources": cache._sources(),
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(f"{len(specs) - failed} of {len(specs)} kernels are in {folder}: {sum(files.values()) / 1e6:.1f} MB")
    return 1 if failed else 0


def planned():
    """The specs of all kernels that the sections launch."""
    import gpu_behaviour
    import gpu_peers
    from gpu_cases import CASES, check
    from gpu_speed import FORMATS, launch_costs, speed

    machine = gpu_machine.Planned()
    for case in CASES:
        check(machine, case)
    for name in ("streams", "graphs", "large"):
        getattr(gpu_behaviour, name)(machine)
    for values, weight in _library_arrays():
        gpu_behaviour._right(machine, values, weight)
    for format_ in FORMATS:
        for _ in speed(machine, format_, gpu_peers.no_calls, lambda: True, lambda figures: None):
            pass
    launch_costs(machine, gpu_peers.no_calls)
    return list(machine.specs)


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
    manifest = json.loads((folder / "manifest.json").read_text())
    from npnorm.cuda import cache

    if cache._sources() != manifest["sources"]:
        return "made of other sources: all are compiled here"
    # Machine code runs without the compilers that made it; their versions are part of its name all the same.
    cache.versions = lambda: tuple(manifest["versions"])
    return f"{manifest['kernels']} kernels for {manifest['capability']}"
