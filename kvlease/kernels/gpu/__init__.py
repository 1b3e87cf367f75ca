"""Triton kernels, one op a file; each has its plain torch twin in the parent package.

Importing a module of this package imports triton, so only code that runs on a CUDA device does.
"""
