"""What is not collected where the optional libraries of the extra `test` are missing."""

from importlib.util import find_spec

collect_ignore = []
if find_spec("dask") is None:
    collect_ignore.append("npnorm/dask")
if not all(map(find_spec, ("dask", "xarray", "zarr"))):
    collect_ignore.append("docs/larger_than_memory.md")
