"""The kernels themselves. Whoever launches them is `engine.ops.triton.launch`.

What they share: numbers are float32 inside whatever the tensors hold; every size that is fixed for an
engine is a compile-time constant, and none that differs from step to step is, nor is specialised on, so
that serving never waits for the compiler; and whole blocks beyond a sequence's end are never read.
"""
