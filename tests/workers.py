"""How tests are shared out among workers."""


def kernels_of(nodeid):
    """What the tests of one worker have in common: a launch on CUDA; a norm and a dtype, mostly float32 where they name
    none; else nothing but themselves."""
    test, _, values = nodeid.removesuffix("]").partition("[")
    if "cuda_compile" in test:
        return values.split("-(")[0] or nodeid
    norm, dtype = (
        next((value for value in values.split("-") if value in known), None)
        for known in (("layer_norm", "rms_norm"), ("float16", "bfloat16", "float32", "float64"))
    )
    return nodeid if norm is None else f"{norm} {dtype or 'float32'}"
