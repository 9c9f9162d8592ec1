"""The .proto and the code that `make protocol` generates from it."""
