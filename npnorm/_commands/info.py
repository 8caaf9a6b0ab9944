"""``npnorm info``: what npnorm finds on this machine."""

import argparse
import json
import math
import os
import platform
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite.binding import get_host_cpu_name
from numba.core.registry import cpu_target

from .. import __version__
from .._threads import get_num_threads
from ..cpu import cache
from ..cpu.machine import affine_cpus, streaming_size

TOLD = (
    *("sse4.2", "avx", "avx2", "fma", "f16c"),
    *("avx512f", "avx512bw", "avx512vl", "avx512bf16", "avx512fp16"),
    *("neon", "fullfp16", "bf16", "sve"),
)
"""CPU features that matter to a norm, of x86-64 and of ARM."""


def run(options: argparse.Namespace) -> int:
    found = collect()
    print(json.dumps(found, indent=2) if options.json else "\n".join(lines(found)))
    return 0


def collect() -> dict[str, Any]:
    """All that is told, as JSON has it."""
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    present = features.split(",")
    streaming = streaming_size()
    return {
        "versions": {
            "npnorm": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": numba.__version__,
            "llvmlite": llvmlite.__version__,
        },
        "cpu": {
            "target": cpu,
            "host": get_host_cpu_name(),
            "triple": triple,
            "features": [name for name in TOLD if f"+{name}" in present],
        },
        "threads": {"number": get_num_threads(), "decided_by": decided_by()},
        "cache": [
            {
                "folder": str(folder),
                "writable": cache.is_writable(folder),
                "kernels": len(files := cache.files(folder)),
                "bytes": sum(files.values()),
            }
            for folder in cache.folders()
        ],
        "streaming_bytes": None if math.isinf(streaming) else streaming,
        "gpu": gpu(),
    }


def gpu() -> dict[str, Any]:
    """What there is of the CUDA backend: what its extra lacks, what keeps it from working, the devices it works on."""
    from ..cuda import driver
    from ..cuda.table import LEAST

    found: dict[str, Any] = {"missing": driver.missing(), "problem": None, "devices": []}
    try:
        found["devices"] = [
            {"name": name, "compute_capability": f"{major}.{minor}"}
            for name, (major, minor) in driver.devices()
            if (major, minor) >= LEAST
        ]
        if not found["devices"]:
            found["problem"] = "the driver finds no device of compute capability {}.{} or newer".format(*LEAST)
    except (ImportError, RuntimeError) as error:
        found["problem"] = str(error)
    return found


def gpu_line(found: dict[str, Any]) -> str:
    """The same for a reader."""
    if found["missing"]:
        return "none usable: neither of the extras cu13 and cu12 is installed"
    if found["problem"]:
        return f"none usable: {found['problem']}"
    return ", ".join(f"{device['name']} ({device['compute_capability']})" for device in found["devices"])


def decided_by() -> str:
    """What decided the number of threads."""
    if os.environ.get("NPNORM_NUM_THREADS", "").strip():
        return "NPNORM_NUM_THREADS"
    if get_num_threads() < affine_cpus():
        return "the CPU quota of the container"
    return "the CPUs that this process may use"


def lines(found: dict[str, Any]) -> list[str]:
    """The same for a reader."""
    table = list(found["versions"].items())
    cpu, threads, streaming = found["cpu"], found["threads"], found["streaming_bytes"]
    compiled = cpu["target"] + (f" (the machine's is {cpu['host']})" if cpu["target"] != cpu["host"] else "")
    table += [
        ("CPU", compiled),
        ("features", " ".join(cpu["features"]) or "as the CPU's name says"),
        ("threads", f"{threads['number']}: {threads['decided_by']}"),
    ]
    for folder in found["cache"]:
        size = f"{folder['kernels']} kernels, {folder['bytes'] / 1e6:.1f} MB"
        writable = "writable" if folder["writable"] else "not writable"
        table.append(("cache", f"{folder['folder']}: {size}, {writable}"))
    size = "never" if streaming is None else f"outputs of {streaming / 2**20:g} MiB and more, with long rows"
    table += [
        ("streaming", size),
        ("GPU", gpu_line(found["gpu"])),
    ]
    return [f"{name:<10} {value}" for name, value in table]
