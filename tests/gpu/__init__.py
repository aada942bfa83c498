"""What needs CUDA devices; each module says so where there are none."""
