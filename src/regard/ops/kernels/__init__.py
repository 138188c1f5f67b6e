"""Our own kernels, in Triton. They load when they are first run, so nothing here needs a GPU."""
